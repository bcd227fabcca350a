"""B08: handlers that run as free tasks reach the ranks in different orders. Ours: 200 operations over four gloo ranks."""

from __future__ import annotations

import anyio
import pytest
from lilo_definitions import get
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.engine import Engine
from lilo_engine.journal import MemoryJournal
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.config import BackendSettings

from tests.cluster.conftest import REPOSITORY
from tests.cluster.ordered_rank import after
from tests.engine.conftest import Build

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

RANKS = 4
ROUNDS = 50
LIMIT_S = 120


async def test_b08_every_rank_runs_all_operations_in_one_order_and_the_numbers_are_those_of_a_serial_run(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    settings = BackendSettings(rank_class="tests.cluster.ordered_rank:OrderedRank")
    monkeypatch.setattr(BackendSettings, "from_environment", lambda: settings)
    definition, build = get("tiny").derive(topology={"dp": RANKS}), Build()
    root = tmp_path / "checkpoints"
    root.mkdir()
    launcher = MemoryLauncher(definition=definition, checkpoints_root=root, factory=MilesBackend)
    engine = Engine(definition=definition, launcher=launcher, journal=MemoryJournal())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        names = ("a", "b")
        for name in names:
            await engine.create_model(build.model(name))
        sent = {name: [] for name in names}
        for round_number in range(ROUNDS):
            for name in names:
                first = 2 * round_number + 1
                sent[name] += [
                    await engine.submit(build.forward_backward(name, first)),
                    await engine.submit(build.step(name, first + 1)),
                ]
        for name in names:
            assert await numbers(engine, sent[name]) == serial(sent[name])
        tasks.cancel_scope.cancel()
    logs = [(root / f"rank-{rank}.log").read_text().splitlines() for rank in range(RANKS)]
    assert len(logs[0]) == 2 + 4 * ROUNDS
    assert all(log == logs[0] for log in logs)


async def numbers(engine, request_ids):
    """What a client was answered: the loss of each pass and the state after each step."""
    got = []
    for request_id in request_ids:
        with anyio.fail_after(LIMIT_S):
            metrics = (await engine.retrieve(request_id, LIMIT_S)).result.metrics
        got.append(metrics.get("loss:sum", metrics.get("state")))
    return got


def serial(request_ids):
    """The same for a model whose operations run one after another, alone."""
    state, expected = 0, []
    for number, request_id in enumerate(request_ids):
        state = after(state, "step" if number % 2 else request_id)
        expected.append(float(state))
    return expected
