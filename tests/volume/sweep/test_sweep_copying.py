"""The crash sweep, in copying mode: every step of every rank stopped or failed, in pairwise modes."""

import pytest
from lilo_volume.testing.sweep import PROTOCOLS, pairwise_settings, sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_no_fault_at_any_step_of_copying_breaks_an_invariant(caplog):
    caplog.set_level("CRITICAL")
    report = sweep(PROTOCOLS["copying"], pairwise_settings())
    assert report.violations == ()
    assert report.runs > 1000
    assert {"digest", "install own", "commit own", "copy peers"} <= set(report.steps)
    assert {"clear source", "remove source"} <= set(report.steps)
