"""Groups of real processes whose ranks have no model, so that a group starts in the time that torch takes to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lilo_definitions import Definition, get
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.operations.operation import AdamParams, ModelId
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.launchers.spawned import spawn_ranks
from lilo_miles_backend.rank_commands import StepOptimizer

ADAM = AdamParams(
    learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)
LIGHT = "tests.cluster.light_rank:LightRank"
REPOSITORY = Path(__file__).parents[2]

Spawn = Callable[..., DrivenRanks]


def world_of_two(
    *, limit_s: float = 60.0, group_limit_s: float = 120.0, source: str = "package:tiny"
) -> Definition:
    """`tiny` on two ranks, with limits that a test can wait for."""
    tiny = get("tiny")
    return tiny.model_copy(
        update={
            "topology": tiny.topology.model_copy(update={"dp": 2}),
            "model": tiny.model.model_copy(update={"source": source}),
            "limits": tiny.limits.model_copy(
                update={
                    "command_timeout_s": limit_s,
                    "distributed_timeout_minutes": group_limit_s / 60,
                }
            ),
        }
    )


def act(what: str) -> StepOptimizer:
    """The command by which a light rank does something; `light_rank.py` lists them."""
    return StepOptimizer(model_id=ModelId(what), params=ADAM)


@pytest.fixture
def spawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawn]:
    """Starts groups of light ranks; whatever is left of them is ended."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    started: list[DrivenRanks] = []

    def start(definition: Definition | None = None, **settings: float) -> DrivenRanks:
        config = BackendConfig(
            definition=definition or world_of_two(), checkpoints_root=str(tmp_path), epoch=1
        )
        started.append(spawn_ranks(config, BackendSettings(rank_class=LIGHT, **settings)))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()
