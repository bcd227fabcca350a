"""What the machine decides: read from the environment, and refused when it makes no sense."""

from __future__ import annotations

import pytest
from lilo_engine.errors import InvalidRequest
from lilo_miles_backend.config import BackendSettings


def test_one_thread_unless_the_machine_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILO_RANK_THREADS", raising=False)
    assert BackendSettings.from_environment().threads_per_rank == 1
    monkeypatch.setenv("LILO_RANK_THREADS", "3")
    assert BackendSettings.from_environment().threads_per_rank == 3


@pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5"])
def test_a_senseless_number_of_threads_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LILO_RANK_THREADS", text)
    with pytest.raises(InvalidRequest):
        BackendSettings.from_environment()
