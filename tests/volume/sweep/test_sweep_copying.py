"""The crash sweep, in copying mode: every step of every rank stopped or failed, in pairwise modes."""

import pytest
from lilo_volume.testing.sweep import PROTOCOLS, pairwise_settings, sweep

SETTINGS = pairwise_settings()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_no_fault_at_any_step_of_copying_breaks_an_invariant(caplog, number):
    caplog.set_level("CRITICAL")
    report = sweep(PROTOCOLS["copying"], [SETTINGS[number]])
    assert report.violations == ()
    assert report.runs > 100
    assert {"digest", "install own", "commit own", "copy peers"} <= set(report.steps)
    assert {"clear source", "remove source"} <= set(report.steps)
