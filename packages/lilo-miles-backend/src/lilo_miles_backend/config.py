"""BackendSettings: what a machine decides about a trainer, as opposed to its definition. Reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lilo_engine.errors import InvalidRequest

_THREADS = "LILO_RANK_THREADS"
_SILENCE = "LILO_RANK_SILENCE_S"
_CLUSTER_WAIT = "LILO_CLUSTER_WAIT_S"
RAY_ADDRESS = "LILO_RAY_ADDRESS"

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's names for it, old and new."""

HANDED_OVER = (
    "LILO_CHECKPOINT_VOLUME",
    "LILO_CHECKPOINT_ROOT",
    "LILO_BULLETIN_VOLUME",
    "LILO_BULLETIN_ROOT",
    "LILO_MODELS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
)
"""Variables that ranks on other nodes get by name: they inherit their node's environment, not the driver's, and a
rank without its volume would silently write nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of this machine, read once when the backend starts."""

    threads_per_rank: int = 1
    """torch threads of one rank. One, since ranks x threads over the cores makes timings collapse, and a
    laptop's cores also serve HTTP and the sampler. `LILO_RANK_THREADS`."""
    rank_silence_s: float = 30.0
    """A rank that tells no progress for this long is stopped or cut off, and ends the group; one that computes or
    waits in a collective does tell. Longer than a process is kept from its interpreter by anything but a stop.
    `LILO_RANK_SILENCE_S`."""
    cluster_wait_s: float = 120.0
    """For enough nodes with enough devices to join: containers of a cluster start minutes apart.
    `LILO_CLUSTER_WAIT_S`."""
    ray_address: str | None = None
    """`host:port` of the Ray cluster whose nodes the ranks run on; None: on this machine. `LILO_RAY_ADDRESS`, which
    `lilo serve --ray` sets."""
    rank_class: str = "lilo_miles_backend.ranks.rank:Rank"
    """Which class a rank is, as `module:Name`; one that extends it may be put here, as by tests whose ranks fail."""

    @classmethod
    def from_environment(cls) -> BackendSettings:
        """Read the variables named above.

        Raises:
            InvalidRequest: a variable is no number, or not above 0; names it.
        """
        text = os.environ.get(_THREADS, "1")
        if not text.isdecimal() or int(text) < 1:
            raise InvalidRequest(f"{_THREADS} is {text!r}; expected a whole number from 1")
        return cls(
            threads_per_rank=int(text),
            rank_silence_s=_seconds(_SILENCE, 30.0),
            cluster_wait_s=_seconds(_CLUSTER_WAIT, 120.0),
            ray_address=os.environ.get(RAY_ADDRESS) or None,
        )


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidRequest(f"{name} is {text!r}; expected seconds above 0")
    return value


def handed_over() -> Mapping[str, str]:
    """The variables of `HANDED_OVER` that are set here."""
    return {name: os.environ[name] for name in HANDED_OVER if os.environ.get(name)}


def environment_with(variables: Mapping[str, str]) -> Mapping[str, str]:
    """All variables for a child: ours, and those given here where ours has none."""
    return {**variables, **os.environ}


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set variables of this process that libraries read when they are first used."""
    os.environ.update(variables)


def allocate_in_segments() -> None:
    """Have torch grow and shrink pieces of GPU memory instead of keeping fixed ones; read when it first takes memory.

    Packed batches differ in length from pass to pass, and what was freed of one must serve the next.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
