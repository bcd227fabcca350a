"""The crash sweep, in place: every step of every rank stopped or failed, in pairwise modes; `make prove-sweep` has all."""

import pytest
from lilo_volume.testing.sweep import PROTOCOLS, pairwise_settings, sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_no_fault_at_any_step_breaks_an_invariant(caplog):
    caplog.set_level("CRITICAL")
    report = sweep(PROTOCOLS["in place"], pairwise_settings())
    assert report.violations == ()
    assert report.runs > 1000
    assert {"record", "commit record", "join", "probe", "flush", "report"} <= set(report.steps)
    assert {"commit", "check", "look", "manifest", "commit manifest"} <= set(report.steps)
    assert {"replace", "announce", "clear", "remove"} <= set(report.steps)
