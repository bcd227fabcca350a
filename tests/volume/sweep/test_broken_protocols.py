"""Protocols that are broken on purpose are caught by the same sweep."""

import pytest
from lilo_volume.testing.sweep import pairwise_settings, sweep

from tests.volume.sweep.broken import BROKEN


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_caught(name, caplog):
    caplog.set_level("CRITICAL")
    saving, invariant = BROKEN[name]
    # The unkind settings first: one violation is enough.
    settings = sorted(
        pairwise_settings(), key=lambda s: (s.modes.commit_atomic, s.modes.rpc_faults != "mid")
    )
    report = sweep(saving, settings, until=invariant)
    assert invariant in report.broken
