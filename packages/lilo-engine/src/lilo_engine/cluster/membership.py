"""Membership: which machine of a cluster this is, from what the provider says. No decision, no process.

Modal has two ways to ask: `modal.Cluster.from_context()` (current) and `modal.experimental.get_cluster_info()` (older).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lilo_engine.errors import InvalidRequest, ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The containers of one run, and which of them this is."""

    rank: int
    """Of this container; 0 is the head."""
    addresses: tuple[str, ...]
    """IPv4, by rank."""

    @property
    def is_head(self) -> bool:
        """Whether engine and front run here."""
        return self.rank == 0

    @property
    def head(self) -> str:
        """Address of the head."""
        return self.addresses[0]

    @property
    def own(self) -> str:
        """Address of this container."""
        return self.addresses[self.rank]


ALONE = Cluster(rank=0, addresses=("127.0.0.1",))
"""One container, which needs nobody's address."""


def cluster_of_container(size: int) -> Cluster:
    """The Modal cluster that this container is in.

    Raises:
        ImportError: the extra `modal` is not installed.
        InvalidRequest: this is no container of a cluster.
        ServerError: as `read_cluster`.
    """
    client = importlib.import_module("modal")
    try:
        return read_cluster(client, size)
    except client.exception.Error as error:
        raise InvalidRequest(f"this is no container of a Modal cluster: {error}") from error


def read_cluster(client: object, size: int) -> Cluster:
    """Ask the provider's client.

    Args:
        client: The module `modal`.
        size: Containers that the definition asks for; one needs no question.

    Raises:
        ServerError: the provider's answer is of another size or names no place in it; both numbers are said.
    """
    if size == 1:
        return ALONE
    rank, addresses = _current(client) if hasattr(client, "Cluster") else _older(client)
    if len(addresses) != size or not 0 <= rank < size:
        raise ServerError(
            f"the cluster has {len(addresses)} containers and this is number {rank}; the definition asks for {size}, "
            "numbered from 0: deploy it again"
        )
    return Cluster(rank=rank, addresses=tuple(addresses))


def _current(client: object) -> tuple[int, Sequence[str]]:
    cluster = cast(Any, client).Cluster.from_context()
    rank: Callable[[], int] = cluster.container_rank
    addresses: Callable[[str], Sequence[str]] = cluster.container_ips
    return rank(), addresses("ipv4")


def _older(client: object) -> tuple[int, Sequence[str]]:
    found = cast(Any, client).experimental.get_cluster_info()
    # Before there was a list of IPv4 addresses, `container_ips` held them.
    addresses: Sequence[str] = getattr(found, "container_ipv4_ips", None) or found.container_ips
    return int(found.rank), addresses
