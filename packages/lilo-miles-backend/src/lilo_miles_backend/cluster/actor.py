"""RankActor: one rank as a Ray actor: its mailboxes are concurrency groups, so that they run beside each other."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

import ray
from lilo_definitions import Definition
from lilo_engine.cluster.network import interface_of
from lilo_engine.commands.backend import BackendConfig
from lilo_volume.config import node_id

from lilo_miles_backend.config import BackendSettings, add_to_environment
from lilo_miles_backend.launchers.host import RankHost
from lilo_miles_backend.ranks.place import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where an actor came to run."""

    pid: int
    ray_node: str
    """Ray's id of its machine."""
    node: str
    """Identity of what shares one view of the volume, as lilo-volume has it."""
    address: str
    free_port: int
    """A port that was free there a moment ago, for the ranks to meet at."""


class RankActor:
    """A rank's process; `ray.remote` is applied where it is placed."""

    def __init__(
        self, definition: Definition, config: tuple[str, int], settings: BackendSettings
    ) -> None:
        """Note what the rank will be made of; `Begin` makes it."""
        root, epoch = config
        self._config = BackendConfig(definition=definition, checkpoints_root=root, epoch=epoch)
        self._settings = settings

    def locate(self, place: RankPlace) -> Whereabouts:
        """Take a place, and tell where it is."""
        address = ray.util.get_node_ip_address()
        # Per machine, since a name that is right on one is an error on another; read when torch first connects.
        if interface := interface_of(address):
            add_to_environment({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
        self._host = RankHost(self._config, self._settings, replace(place, node=node_id()))
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        return Whereabouts(
            pid=os.getpid(),
            ray_node=ray.get_runtime_context().get_node_id(),
            node=node_id(),
            address=address,
            free_port=port,
        )

    def answer(self, frame: bytes) -> bytes:
        """One command of the mailbox that the caller chose as concurrency group."""
        return self._host.answer(frame)
