"""Spawned ranks: processes of this machine, reached over socket pairs.

A rank is in the process group of its driver, so that what ends the driver's group ends it too; when the driver alone
is killed, its end of the sockets closes and the rank ends by itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.child import describe_exit
from lilo_engine.commands.connection import Connection
from lilo_engine.commands.frames import FrameError

from lilo_miles_backend.config import BackendSettings, environment_with
from lilo_miles_backend.launchers.carried_member import CarriedMember, places_of
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.launchers.facts import local_facts
from lilo_miles_backend.launchers.limits import DriverLimits
from lilo_miles_backend.launchers.mailboxes import Mailbox
from lilo_miles_backend.launchers.member import LinkLost
from lilo_miles_backend.launchers.rank_config import RankConfig
from lilo_miles_backend.ranks.place import RankPlace

_PREFIX = "lilo-ranks-"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Ranks of one machine talk over it, whatever the hostname resolves to."""


def spawn_ranks(config: BackendConfig, settings: BackendSettings) -> DrivenRanks:
    """Start all ranks on this machine; returns when each holds the base model.

    Raises:
        LiloError: they could not start; none is left.
        OSError: a process could not be started; none is left.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    members: list[SpawnedMember] = []
    world_size = config.definition.topology.world_size
    rendezvous = f"file://{folder / 'meet'}"
    try:
        for rank in range(world_size):
            place = RankPlace(
                rank=rank,
                world_size=world_size,
                rendezvous=rendezvous,
                local_rank=rank,
                num_devices=world_size,
            )
            members.append(SpawnedMember(config, settings, place))
    except OSError:
        for member in members:
            member.kill()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ranks = DrivenRanks(
        config.definition,
        members,
        DriverLimits(limits=config.definition.limits, silence_s=settings.rank_silence_s),
        facts=local_facts(config, settings),
        give_back=lambda: shutil.rmtree(folder, ignore_errors=True),
    )
    ranks.begin(rendezvous)
    return ranks


class SpawnedMember(CarriedMember):
    """One rank's process."""

    def __init__(self, config: BackendConfig, settings: BackendSettings, place: RankPlace) -> None:
        """Start the process; returns at once."""
        places = places_of(place.rank, config.definition.limits.publication_workers)
        super().__init__(place.rank, place.node, places)
        ours, theirs = _socket_pairs(places)
        try:
            self._child = _start(config, settings, place, theirs)
        except OSError:
            _close(ours)
            raise
        finally:
            _close(theirs)
        self._connections = {
            mailbox: [Connection(stream) for stream in streams] for mailbox, streams in ours.items()
        }
        self.carry()
        threading.Thread(target=self._reap, name=f"rank-{self.rank}-reap", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def kill(self) -> None:
        """SIGKILL, which a stopped process obeys too."""
        # Until the reaper has waited for it, its number cannot be another's; after that, this does nothing.
        self._child.send_signal(signal.SIGKILL)

    def exchange(self, mailbox: Mailbox, place: int, frame: bytes) -> bytes:
        """Over the socket of this place."""
        connection = self._connections[mailbox][place]
        try:
            connection.send_frame(frame, None)
            return bytes(connection.receive_frame(None))
        except (OSError, EOFError, FrameError) as error:
            raise LinkLost from error

    def _reap(self) -> None:
        code = self._child.wait()
        self.end(describe_exit(code))
        for connections in self._connections.values():
            for connection in connections:
                connection.close()


def _sweep() -> None:
    """Remove the meeting places of drivers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _socket_pairs(
    places: Mapping[Mailbox, int],
) -> tuple[dict[Mailbox, list[socket.socket]], dict[Mailbox, list[socket.socket]]]:
    ours: dict[Mailbox, list[socket.socket]] = {mailbox: [] for mailbox in places}
    theirs: dict[Mailbox, list[socket.socket]] = {mailbox: [] for mailbox in places}
    for mailbox, number in places.items():
        for _ in range(number):
            our, their = socket.socketpair()
            ours[mailbox].append(our)
            theirs[mailbox].append(their)
    return ours, theirs


def _start(
    config: BackendConfig,
    settings: BackendSettings,
    place: RankPlace,
    streams: Mapping[Mailbox, list[socket.socket]],
) -> subprocess.Popen[bytes]:
    told = RankConfig(
        definition=config.definition,
        checkpoints_root=config.checkpoints_root,
        epoch=config.epoch,
        settings=settings,
        place=place,
        descriptors={name: [s.fileno() for s in members] for name, members in streams.items()},
    )
    child = subprocess.Popen(
        # -P: a file in the working directory must not stand in for a module.
        [sys.executable, "-P", "-m", "lilo_miles_backend.launchers.rank_process"],
        stdin=subprocess.PIPE,
        env=environment_with({"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}),
        pass_fds=[stream.fileno() for members in streams.values() for stream in members],
    )
    assert child.stdin is not None
    try:
        with child.stdin as pipe:
            pipe.write(told.model_dump_json().encode() + b"\n")
    except BrokenPipeError:
        # It ended already; whoever waits for it says how.
        pass
    return child


def _close(streams: Mapping[Mailbox, list[socket.socket]]) -> None:
    for members in streams.values():
        for stream in members:
            stream.close()
