"""SpawnedRanks: ranks as processes of this machine, reached over socket pairs.

A rank is in the process group of its driver, so that what ends the driver's group ends it too; when the driver alone
is killed, its end of the sockets closes and the rank ends by itself.
"""

from __future__ import annotations

import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.connection import Connection
from lilo_engine.commands.frames import FrameError
from lilo_engine.commands.child import describe_exit

from lilo_miles_backend.config import BackendSettings, environment_with
from lilo_miles_backend.launchers.driver import DrivenRanks
from lilo_miles_backend.launchers.limits import DriverLimits
from lilo_miles_backend.launchers.mailboxes import Mailbox
from lilo_miles_backend.launchers.member import LinkLost
from lilo_miles_backend.launchers.rank_config import RankConfig
from lilo_miles_backend.ranks.place import RankPlace

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Ranks of one machine talk over it, whatever the hostname resolves to."""
REAP_LIMIT_S = 5.0
"""From SIGKILL until a process is gone: only one stuck in the kernel takes longer."""


def spawn_ranks(config: BackendConfig, settings: BackendSettings) -> DrivenRanks:
    """Start all ranks on this machine; returns when each holds the base model.

    Raises:
        LiloError: they could not start; none is left.
        OSError: a process could not be started; none is left.
    """
    folder = Path(tempfile.mkdtemp(prefix="lilo-ranks-"))
    members: list[SpawnedMember] = []
    world_size = config.definition.topology.world_size
    rendezvous = f"file://{folder / 'meet'}"
    try:
        for rank in range(world_size):
            place = RankPlace(
                rank=rank, world_size=world_size, rendezvous=rendezvous, local_rank=rank
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
        give_back=lambda: shutil.rmtree(folder, ignore_errors=True),
    )
    ranks.begin(rendezvous)
    return ranks


class SpawnedMember:
    """One rank's process; implements `Member`."""

    def __init__(self, config: BackendConfig, settings: BackendSettings, place: RankPlace) -> None:
        """Start the process; returns at once."""
        self.rank = place.rank
        self.node = place.node
        self._ended = threading.Event()
        self._fate: str | None = None
        self._watchers: list[Callable[[], None]] = []
        self._watching = threading.Lock()
        ours, theirs = _socket_pairs(config, place)
        try:
            self._child = _start(config, settings, place, theirs)
        except OSError:
            _close(ours)
            raise
        finally:
            _close(theirs)
        self._queues: dict[Mailbox, queue.SimpleQueue[_Posted | None]] = {}
        self._num_carriers: dict[Mailbox, int] = {}
        for mailbox, streams in ours.items():
            self._queues[mailbox] = queue.SimpleQueue()
            self._num_carriers[mailbox] = len(streams)
            for stream in streams:
                _daemon(self._carry, self._queues[mailbox], stream)
        _daemon(self._reap)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def post(self, mailbox: Mailbox, frame: bytes) -> Future[bytes]:
        """Queue one command."""
        posted = _Posted(frame)
        # Looked at under the lock: what is queued after the end would be taken by nobody.
        with self._watching:
            if self._fate is None:
                self._queues[mailbox].put(posted)
                return posted.answer
        posted.answer.set_exception(LinkLost())
        return posted.answer

    def fate(self) -> str | None:
        """How the process ended."""
        return self._fate

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` at the end of the process."""
        with self._watching:
            if self._fate is None:
                self._watchers.append(ended)
                return
        ended()

    def kill(self) -> None:
        """SIGKILL, which a stopped process obeys too."""
        # The reaper holds the child until it is waited for, so that its number cannot be another's.
        self._child.send_signal(signal.SIGKILL)
        self._ended.wait(REAP_LIMIT_S)

    def _reap(self) -> None:
        code = self._child.wait()
        with self._watching:
            self._fate = describe_exit(code)
            watchers = list(self._watchers)
        self._ended.set()
        for ended in watchers:
            ended()
        for mailbox, waiting in self._queues.items():
            _refuse_all(waiting)
            for _ in range(self._num_carriers[mailbox]):
                waiting.put(None)

    def _carry(self, posts: queue.SimpleQueue[_Posted | None], stream: socket.socket) -> None:
        """Carry commands over one connection, one at a time, until it breaks or the process ended."""
        connection = Connection(stream)
        while True:
            posted = posts.get()
            if posted is None:
                connection.close()
                return
            try:
                connection.send_frame(posted.frame, None)
                answer = bytes(connection.receive_frame(None))
            except (OSError, EOFError, FrameError):
                # The connection ends with the process: how it ended is known in a moment.
                self._ended.wait(REAP_LIMIT_S)
                posted.answer.set_exception(LinkLost())
                connection.close()
                return
            posted.answer.set_result(answer)


class _Posted:
    __slots__ = ("answer", "frame")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.answer: Future[bytes] = Future()


def _refuse_all(waiting: queue.SimpleQueue[_Posted | None]) -> None:
    while True:
        try:
            posted = waiting.get_nowait()
        except queue.Empty:
            return
        if posted is not None:
            posted.answer.set_exception(LinkLost())


def _socket_pairs(
    config: BackendConfig, place: RankPlace
) -> tuple[dict[Mailbox, list[socket.socket]], dict[Mailbox, list[socket.socket]]]:
    numbers: dict[Mailbox, int] = {"train": 1, "persist": 1, "beat": 1}
    if place.rank == 0:
        numbers["publish"] = config.definition.limits.publication_workers
    ours: dict[Mailbox, list[socket.socket]] = {name: [] for name in numbers}
    theirs: dict[Mailbox, list[socket.socket]] = {name: [] for name in numbers}
    for mailbox, number in numbers.items():
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
        env=environment_with({"GLOO_SOCKET_IFNAME": LOOPBACK}),
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


def _daemon(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()
