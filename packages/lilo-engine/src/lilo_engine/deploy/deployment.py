"""Deployment: what would be created for a definition, as pure data. Not the provider's objects: `modal.py` makes those.

Every field of a definition ends here: as a resource, a mount, a limit, an argument of the sampling engine, or in the
definition that the containers are handed whole. What a provider cannot give is refused, by the field's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lilo_definitions import Definition, digest

from lilo_engine.deploy.function_plan import FunctionPlan
from lilo_engine.deploy.prices import Cost
from lilo_engine.deploy.sampler_plan import sampler_plan
from lilo_engine.deploy.trainer_plan import trainer_plan
from lilo_engine.errors import InvalidRequest

GPUS_PER_HOST = 8
"""A container of a cluster takes a whole host."""
PYTHONS = ("3.11", "3.12", "3.13")
"""Of images: what both the provider and our packages have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Everything that would be created."""

    app: str
    definition: str
    digest: str
    """Of the definition: a deployment made from another version of it can be told."""
    trainer: FunctionPlan
    sampler: FunctionPlan | None
    urls: str
    """Name of the dictionary in which a run's address stands: run -> URL."""
    cost: Cost
    notes: tuple[str, ...] = field(default=())
    """What a reader should know before renting."""

    @property
    def volumes(self) -> tuple[str, ...]:
        """Names of all volumes, each once."""
        functions = (self.trainer, *((self.sampler,) if self.sampler else ()))
        return tuple(dict.fromkeys(mount.volume for f in functions for mount in f.mounts))


def plan(definition: Definition, *, wheels: str | None = None, python: str = "3.12") -> Deployment:
    """What would be created for `definition`.

    Args:
        definition: What to deploy.
        wheels: Folder with wheels of our packages (`make build`); None takes released ones from the index.
        python: Of the images.

    Raises:
        InvalidRequest: a field asks for what the provider cannot give; the message names it.
    """
    if python not in PYTHONS:
        raise InvalidRequest(f"python is {python!r}; images are made with {', '.join(PYTHONS)}")
    _check(definition)
    trainer = trainer_plan(definition, app_name(definition), wheels, python)
    replicas = definition.sampler.pool
    sampler = None if replicas is None else sampler_plan(definition, replicas, wheels, python)
    return Deployment(
        app=app_name(definition),
        definition=definition.name,
        digest=digest(definition),
        trainer=trainer,
        sampler=sampler,
        urls=f"{app_name(definition)}-urls",
        cost=_cost(definition, trainer, sampler),
        notes=_notes(definition),
    )


def app_name(definition: Definition) -> str:
    """The provider's name for everything of one definition."""
    return f"lilo-{definition.name}"


def _check(definition: Definition) -> None:
    topology, wrong = definition.topology, list[str]()
    if topology.device == "cuda" and topology.gpu is None:
        wrong.append("topology.gpu is not given; name the GPU to rent")
    if topology.nodes > 1 and topology.device == "cpu":
        wrong.append(f"topology.nodes is {topology.nodes} on cpu; clusters are of GPU hosts only")
    if topology.nodes > 1 and topology.device == "cuda" and topology.gpus_per_node != GPUS_PER_HOST:
        wrong.append(
            f"topology.gpus_per_node is {topology.gpus_per_node} with nodes {topology.nodes}; a container of a "
            f"cluster takes a whole host of {GPUS_PER_HOST}"
        )
    if not definition.model.source.startswith(("hf:", "package:")):
        wrong.append(
            f"model.source is {definition.model.source!r}; a folder of this machine is not there in a container: put "
            f"the model into the volume {definition.deployment.models_volume!r} and name it hf:ORG/NAME"
        )
    if wrong:
        raise InvalidRequest(
            f"definition {definition.name!r} cannot be deployed: " + "; ".join(wrong)
        )


def _cost(definition: Definition, trainer: FunctionPlan, sampler: FunctionPlan | None) -> Cost:
    replicas = definition.sampler.pool
    low, high = (replicas.min_replicas, replicas.max_replicas) if replicas is not None else (0, 0)
    each = sampler.usd_per_hour if sampler is not None else 0.0
    return Cost(
        trainer_usd=trainer.usd_per_hour * trainer.cluster_size,
        sampler_min_usd=each * low,
        sampler_max_usd=each * high,
    )


def _notes(definition: Definition) -> tuple[str, ...]:
    notes = [
        f"the base model must lie in the volume {definition.deployment.models_volume!r} as "
        f"{definition.model.source.removeprefix('hf:')}"
    ]
    if definition.model.source.startswith("package:"):
        notes = ["the base model comes with lilo-definitions"]
    notes.append(
        f"the front listens on the {'head' if definition.topology.nodes > 1 else 'trainer'} container; its address "
        "stands in the dictionary above, and changes with each container of a run"
    )
    return tuple(notes)
