"""The whole trainer over spawned ranks, through the Backend protocol: what only real ranks can show."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from lilo_definitions import get
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Destination, WorkItem
from lilo_engine.errors import BackendLost, InvalidRequest
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_MINUTES = 7.0


def test_b39_the_definitions_limit_is_that_of_every_group_on_every_rank_and_a_group_saves_loads_and_dies_whole(
    tmp_path: Path,
) -> None:
    """One group for all of it: starting one costs as much as the rest together."""
    tiny = get("tiny")
    definition = tiny.model_copy(
        update={
            "topology": tiny.topology.model_copy(update={"tp": 2}),
            "limits": tiny.limits.model_copy(
                update={"distributed_timeout_minutes": LIMIT_MINUTES, "startup_timeout_s": 200.0}
            ),
        }
    )
    backend = MilesBackend(
        BackendConfig(definition=definition, checkpoints_root=str(tmp_path), epoch=1)
    )
    try:
        limits = [dict(info.group_limits_s) for info in backend.ranks.info()]
        assert limits[0] == limits[1]
        training = {name: limit for name, limit in limits[0].items() if name != "persist"}
        assert set(training.values()) == {60 * LIMIT_MINUTES}, limits[0]
        assert len(training) >= 4, limits[0]

        saves_and_loads(backend)
        dies_whole(backend)
    finally:
        backend.close()


def saves_and_loads(backend: MilesBackend) -> None:
    model, again = ModelId("m"), ModelId("again")
    backend.create_adapter(model, ref.spec())
    with pytest.raises(InvalidRequest):
        backend.optim_step(model, ref.ADAM)
    step(backend, model)
    capture = backend.capture(model, "training")
    after = step(backend, model)
    destination = Destination(run_id="run", kind="weights", name="one", order=1, overwrite=False)
    backend.persist(capture, destination)
    backend.create_adapter(again, ref.spec(seed=9))
    source = CheckpointRef(run_id="run", kind="weights", name="one")
    backend.load(again, source, with_optimizer=True)
    assert step(backend, again) == after, "what was loaded goes on as what was not"


def dies_whole(backend: MilesBackend) -> None:
    os.kill(backend.ranks.info()[1].pid, signal.SIGKILL)
    assert "rank 1" in backend.wait_lost()
    for call in (lambda: step(backend, ModelId("m")), backend.health):
        with pytest.raises(BackendLost, match="rank 1"):
            call()


def step(backend: MilesBackend, model: ModelId) -> float:
    """A pass and a step on the same rows every time: the loss before it."""
    datums = tuple(ref.sums(3, np.random.default_rng(5)))
    item = WorkItem(operation_id="o", model_id=model, datums=datums)
    batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=(item,))
    (output,) = backend.forward_backward(batch)
    assert output.error is None
    backend.optim_step(model, ref.ADAM)
    return output.metrics["loss:sum"]
