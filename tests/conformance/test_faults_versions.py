"""Fault B22 that others met with publication after publication, tried here through the SDK; named after it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import tinker
from lilo_definitions import get
from lilo_engine.control.sweeper import SweepSettings
from lilo_engine.requests.front import FrontSettings
from tinker import types

from tests.conformance.conftest import KEY, Served, serve
from tests.conformance.test_faults_adapters import real_trainer
from tests.conformance.test_sdk import draw
from tests.conformance.test_ten_facts import trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

KEPT, PUBLICATIONS = 3, 40
LIMIT_S = 60


@pytest.fixture
def sweeping(tmp_path) -> Iterator[Served]:
    """A server with a real trainer that keeps few snapshots, and looks all the time."""
    sampler = {"ephemeral_versions": KEPT, "max_adapters": 2}
    yield from serve(
        tmp_path,
        FrontSettings(),
        definition=get("tiny").derive(sampler=sampler),
        launcher=real_trainer,
        sweep=SweepSettings(interval_s=0.05),
    )


def loaded(served: Served) -> list[str]:
    """Adapters that the sampler holds."""
    return served.http.get("/api/v1/console/state").json()["sampler"]["loaded_adapters"]


def snapshots(served: Served) -> list[str]:
    """Those on the volume."""
    weights = (served.data_dir / "checkpoints").rglob("adapter_model.safetensors")
    return sorted({each.parent.parent.name for each in weights})


def test_b22_one_publication_after_another_takes_no_more_room_than_a_few(sweeping, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=sweeping.url, api_key=KEY)
    client = trainer(service)
    samplers: list[tinker.SamplingClient] = []
    for _ in range(PUBLICATIONS):
        samplers.append(client.save_weights_and_get_sampling_client().result(timeout=LIMIT_S))
        draw(samplers[-1])
        assert len(loaded(sweeping)) <= 2
    deadline = time.monotonic() + LIMIT_S
    while len(snapshots(sweeping)) > KEPT:
        assert time.monotonic() < deadline, snapshots(sweeping)
    draw(samplers[-1])
    draw(samplers[-KEPT])
    with pytest.raises(
        tinker.APIStatusError, match="was removed; make a sampling client on"
    ) as gone:
        samplers[0].sample(
            types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)
        ).result(timeout=LIMIT_S)
    assert gone.value.status_code == 410
    service.close("success").result(timeout=LIMIT_S)
