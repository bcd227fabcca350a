"""Deployment: what would be created for a definition, as pure data. Not the provider's objects: `modal.py` makes those.

Every field of a definition ends here: as a resource, a mount, a limit, an argument of the sampling engine, or in the
definition that the containers are handed whole. What a provider cannot give is refused, by the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from lilo_definitions import Definition, GpuName, Pool, canonical_json, digest

from lilo_engine.deploy import places, pool
from lilo_engine.deploy.prices import Cost, container_usd_per_hour
from lilo_engine.errors import InvalidRequest

GPUS_PER_HOST = 8
"""A container of a cluster takes a whole host."""
ENGINE, BACKEND = "lilo-engine", "lilo-miles-backend"
RETRIES = 3
"""Of a trainer call that failed: it goes on from the newest verified state, so that another try loses little."""
FOREVER_S = 24 * 3600
"""The provider's longest life of a container."""
SAMPLER_CPUS, SAMPLER_MEMORY_MIB = 8.0, 65_536
"""Of a replica: tokenless HTTP and scheduling, and adapters that wait in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A volume at a path."""

    path: str
    volume: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One of our packages in an image."""

    name: str
    version: str
    extra: str = ""

    @property
    def requirement(self) -> str:
        """For an index."""
        return f"{self.name}{self._extra}=={self.version}"

    @property
    def wheel(self) -> str:
        """Name of its wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def in_folder(self, folder: str) -> str:
        """For an installer, its wheel in a folder."""
        return f"{folder}/{self.wheel}{self._extra}"

    @property
    def _extra(self) -> str:
        return f"[{self.extra}]" if self.extra else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What a container image is made of."""

    base: str | None
    """Image of a registry; None: the provider's small Debian."""
    python: str
    packages: tuple[str, ...]
    """Requirements of other people's packages, installed first."""
    ours: tuple[Own, ...]
    """Our packages, at the versions that are installed where the command was typed."""
    wheels: str | None = None
    """Folder with the wheels of ours; None: they come from the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPlan:
    """One function: containers that run the same body."""

    name: str
    body: str
    """Name of the function in `lilo_engine.deploy.bodies`."""
    image: ImagePlan
    gpu: GpuName | None
    num_gpus: int
    """Per container."""
    cpus: float
    memory_mib: int
    timeout_s: int
    startup_timeout_s: int
    retries: int
    single_use_containers: bool
    mounts: tuple[Mount, ...]
    secrets: tuple[str, ...]
    environment: Mapping[str, str]
    """Handed to the container by name; nothing is inherited from where the command was typed."""
    cluster_size: int = 1
    rdma: bool = False
    min_containers: int = 0
    max_containers: int | None = None
    scaledown_s: int | None = None
    target_inputs: int | None = None
    """Inputs per container that the provider scales towards; None: one."""
    max_inputs: int | None = None
    port: int | None = None
    """Of the HTTP server that the body starts; None: it starts none for the provider to route to."""

    @property
    def gpu_text(self) -> str | None:
        """As the provider writes it, `H200:8`."""
        return f"{self.gpu}:{self.num_gpus}" if self.gpu is not None else None

    @property
    def usd_per_hour(self) -> float:
        """One container for one hour."""
        return container_usd_per_hour(
            gpu=self.gpu, num_gpus=self.num_gpus, cpus=self.cpus, memory_mib=self.memory_mib
        )


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
    _check(definition)
    trainer = _trainer(definition, wheels, python)
    sampler = _sampler(definition, definition.sampler.pool, wheels, python)
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


def _trainer(definition: Definition, wheels: str | None, python: str) -> FunctionPlan:
    topology, rented, limits = definition.topology, definition.deployment, definition.limits
    mounts = [
        Mount(path=places.MODELS_MOUNT, volume=rented.models_volume, read_only=True),
        Mount(path=places.CHECKPOINTS_MOUNT, volume=rented.checkpoints_volume),
        Mount(path=places.BULLETIN_MOUNT, volume=rented.bulletin_volume),
    ]
    if rented.kernel_cache_volume is not None:
        mounts.append(Mount(path=places.KERNELS_MOUNT, volume=rented.kernel_cache_volume))
    _check_distinct(definition, mounts)
    return FunctionPlan(
        name="trainer",
        body="trainer",
        image=ImagePlan(
            base=None,
            python=python,
            packages=(),
            ours=(*_ours("modal"), Own(name=BACKEND, version=_version(BACKEND))),
            wheels=wheels,
        ),
        gpu=topology.gpu,
        num_gpus=topology.gpus_per_node,
        cpus=rented.cpus_per_node,
        memory_mib=rented.memory_gib_per_node * 1024,
        timeout_s=round(rented.trainer_timeout_hours * 3600),
        # The body starts the trainer and waits for it; the container itself only imports the engine.
        startup_timeout_s=round(limits.startup_timeout_s),
        retries=RETRIES,
        single_use_containers=rented.single_use_containers,
        mounts=tuple(mounts),
        secrets=rented.secrets,
        environment=_environment(definition),
        cluster_size=topology.nodes,
        rdma=topology.rdma,
    )


def _check_distinct(definition: Definition, mounts: list[Mount]) -> None:
    names = [mount.volume for mount in mounts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(
            f"definition {definition.name!r} cannot be deployed: the volume {twice[0]!r} would be mounted at two "
            "places of one container; give each of models, checkpoints, bulletin and kernel cache its own"
        )


def _environment(definition: Definition) -> Mapping[str, str]:
    rented = definition.deployment
    environment = {
        places.APP: app_name(definition),
        places.DEFINITION: canonical_json(definition).decode("ascii"),
        places.DATA_DIR: places.DATA_FOLDER,
        places.MODELS: places.MODELS_MOUNT,
        places.CHECKPOINT_VOLUME: rented.checkpoints_volume,
        places.CHECKPOINT_ROOT: f"{places.CHECKPOINTS_MOUNT}/{places.STATES_FOLDER}",
        places.BULLETIN_VOLUME: rented.bulletin_volume,
        places.BULLETIN_ROOT: places.BULLETIN_MOUNT,
    }
    if rented.kernel_cache_volume is not None:
        environment |= {name: f"{places.KERNELS_MOUNT}/{name.lower()}" for name in places.CACHES}
    return environment


def _sampler(
    definition: Definition, replicas: Pool | None, wheels: str | None, python: str
) -> FunctionPlan | None:
    if replicas is None:
        return None
    rented, most = definition.deployment, definition.sampler.sequences
    folder = f"{places.MODELS_MOUNT}/{definition.model.source.removeprefix('hf:')}"
    command = pool.command_of(definition, replicas, folder)
    return FunctionPlan(
        name="sampler",
        body="sampler",
        image=ImagePlan(
            base="nvidia/cuda:12.9.1-devel-ubuntu24.04",
            python=python,
            packages=(pool.package_of(definition),),
            ours=_ours(""),
            wheels=wheels,
        ),
        gpu=replicas.gpu,
        num_gpus=replicas.gpus_per_replica,
        cpus=SAMPLER_CPUS,
        memory_mib=SAMPLER_MEMORY_MIB,
        timeout_s=FOREVER_S,
        startup_timeout_s=replicas.startup_timeout_s,
        retries=0,
        single_use_containers=False,
        mounts=(
            Mount(path=places.MODELS_MOUNT, volume=rented.models_volume, read_only=True),
            Mount(path=places.BULLETIN_MOUNT, volume=rented.bulletin_volume, read_only=True),
        ),
        secrets=rented.secrets,
        environment={
            places.SAMPLER_COMMAND: json.dumps(command),
            **pool.environment_of(definition),
        },
        min_containers=replicas.min_replicas,
        max_containers=replicas.max_replicas,
        scaledown_s=replicas.scale_down_s,
        target_inputs=replicas.target_sequences,
        max_inputs=most + replicas.max_queued,
        port=places.SAMPLER_PORT,
    )


def _ours(extra: str) -> tuple[Own, ...]:
    """The engine and what it needs of ours."""
    needed = ("lilo-volume", "lilo-definitions")
    own = tuple(Own(name=name, version=_version(name)) for name in needed)
    return (*own, Own(name=ENGINE, version=_version(ENGINE), extra=extra))


def _version(name: str) -> str:
    """Of a package; where a planner has no trainer installed, the engine's, which is released in step."""
    try:
        return version(name)
    except PackageNotFoundError:
        return version(ENGINE)


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
