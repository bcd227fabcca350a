"""The crash sweep, in place: every step of every rank stopped or failed, in pairwise modes; `make prove-sweep` has all."""

import pytest
from lilo_volume.testing.sweep import PROTOCOLS, pairwise_settings, sweep

SETTINGS = pairwise_settings()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_no_fault_at_any_step_breaks_an_invariant(caplog, number):
    caplog.set_level("CRITICAL")
    setting = SETTINGS[number]
    report = sweep(PROTOCOLS["in place"], [setting])
    assert report.violations == ()
    assert report.runs > 100
    assert {"record", "commit record", "join", "probe", "flush", "report"} <= set(report.steps)
    assert {"commit", "check", "look", "manifest", "commit manifest"} <= set(report.steps)
    assert {"announce", "clear", "remove"} <= set(report.steps)
    assert ("replace" in report.steps) == setting.same_name
