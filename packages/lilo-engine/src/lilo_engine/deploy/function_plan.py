"""FunctionPlan: one function of a deployment as pure data: its containers, their image, mounts, limits and variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lilo_definitions import GpuName

from lilo_engine.deploy.prices import container_usd_per_hour

ENGINE, BACKEND = "lilo-engine", "lilo-miles-backend"


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


def engine_packages(extra: str = "") -> tuple[Own, ...]:
    """The engine and what it needs of ours, at the versions that are installed here."""
    needed = ("lilo-volume", "lilo-definitions")
    own = tuple(Own(name=name, version=_version(name)) for name in needed)
    return (*own, Own(name=ENGINE, version=_version(ENGINE), extra=extra))


def backend_package() -> Own:
    """The trainer."""
    return Own(name=BACKEND, version=_version(BACKEND))


def _version(name: str) -> str:
    """Of a package; where a planner has no trainer installed, the engine's, which is released in step."""
    try:
        return version(name)
    except PackageNotFoundError:
        return version(ENGINE)
