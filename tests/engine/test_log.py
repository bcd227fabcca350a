"""The log: one record begins one line, whatever clients call things."""

from __future__ import annotations

import io
import logging

import pytest
from lilo_engine.log import RecordFormatter


@pytest.fixture
def logged():
    """Logs with arguments; what is written."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(RecordFormatter())
    log = logging.Logger("lilo_engine.requests")
    log.addHandler(handler)

    def run(*words, **options):
        log.warning(*words, **options)
        return written.getvalue()

    return run


def test_a_clients_text_does_not_look_like_a_record_of_its_own(logged):
    forged = (
        "tired\n2026-11-30 10:00:00,000 INFO lilo_engine.requests.rest: key 1 deleted it\r\x1b[2K"
    )
    first, second = logged("session s ended: %s", forged).splitlines()
    assert first.endswith("WARNING lilo_engine.requests: session s ended: tired")
    assert second.startswith("    2026")
    assert second.endswith(r"deleted it\r\x1b[2K")


def test_a_traceback_stays_as_it_is(logged):
    try:
        raise ValueError("of ours")
    except ValueError:
        lines = logged("it failed", exc_info=True).splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: of ours"
