"""TcpGroup: ranks as processes on any nodes, over sockets of the standard library, with real deadlines.

    rank 1 --.
    rank 2 ---- rank 0      every rank sends its value to rank 0, which sends all values to every rank
    rank 3 --'

Rank 0 decides each collective: it has all values and sends them, or it tells every rank the same error, which names
the step and the ranks and nodes that are gone (at once) or did not come (after the deadline). If rank 0 itself is
gone, the others see that; if it is stopped, their own deadlines end their waits, plus `GRACE_S` in which it may still
say who is really missing.

No threads: a process that is not inside a collective does nothing. Not encrypted: see `rendezvous.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import TracebackType
from typing import Self, TypeVar, cast

from lilo_volume.config import node_id
from lilo_volume.errors import GroupRefused, RankLost, VolumeError
from lilo_volume.groups.codec import decode, encode
from lilo_volume.groups.link import (
    GRACE_S,
    FrameKind,
    Link,
    LinkClosed,
    joined,
    split,
    wait_for_news,
)
from lilo_volume.groups.rendezvous import (
    Who,
    failure_in,
    listen,
    reach_rank_zero,
    receive_ranks,
)

T = TypeVar("T")
MAX_VALUE_BYTES = 256 * 1024 * 1024
"""The longest value of one rank, encoded; a manifest of a million files is shorter."""


def tcp_group(
    address: str,
    *,
    rank: int,
    world_size: int,
    token: str,
    node: str | None = None,
    timeout_s: float = 300.0,
    listener: socket.socket | None = None,
) -> TcpGroup:
    """Meet all ranks; called once by each.

    Args:
        address: `HOST:PORT` where rank 0 listens and all others find it.
        rank: this process's index, from 0.
        world_size: number of ranks.
        token: the same secret text for all; whoever does not know it is turned away.
        node: which node this process is on; told by `node_id` if it is not given.
        timeout_s: limit of the whole rendezvous.
        listener: rank 0 only: a socket that listens already, instead of one made at `address`.

    Raises:
        RankLost: some ranks did not come; every rank that did gets this error.
        GroupRefused: two ranks are the same, world sizes differ, or the token is wrong.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise GroupRefused(f"rank {rank} of {world_size}: expected 0 <= rank < world_size")
    if not token:
        raise GroupRefused("the token is empty; give every rank the same secret text")
    me = Who(rank=rank, world_size=world_size, node=node or node_id(), process=_process())
    host, port = _parsed(address)
    secret = token.encode("utf-8")
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        links, nodes = receive_ranks(listener or listen(host, port), me, secret, deadline)
        for link in links.values():
            link.limit_bytes = MAX_VALUE_BYTES
    else:
        link, nodes = reach_rank_zero(host, port, me, secret, deadline)
        links = {0: link}
    return TcpGroup(rank, nodes, links)


class TcpGroup:
    """One rank's end of the group; made by `tcp_group`. As a context manager it closes at the end."""

    def __init__(self, rank: int, nodes: tuple[str, ...], links: dict[int, Link]) -> None:
        """Rank 0 has a link to every other rank; every other rank has one to rank 0."""
        self._rank = rank
        self._nodes = nodes
        self._links = links
        self._number = 0
        self._failure: Exception | None = None
        self._in_use = threading.Lock()

    @property
    def rank(self) -> int:
        """This process's index, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each rank."""
        return self._nodes

    def all_gather(self, value: T, *, timeout_s: float, step: str) -> list[T]:
        """Every rank's value, in rank order; see `codec.py` for what may cross.

        Raises:
            RankLost: ranks are gone or did not come; every rank gets this error, in all later collectives too.
            TypeError: the value cannot cross; the others hear that this rank failed.
            AssertionError: the ranks took different paths.
        """
        assert self._in_use.acquire(blocking=False), f"{step}: the group is used by another thread"
        try:
            if self._failure is not None:
                raise self._failure
            self._number += 1
            try:
                return cast("list[T]", self._meet(self._encoded(value), timeout_s, step))
            except Exception as error:
                self._failure = error
                self._hang_up()
                raise
        finally:
            self._in_use.release()

    def broadcast(self, value: T | None, *, timeout_s: float, step: str) -> T:
        """Rank 0's value on every rank; returns when all have come, so that all succeed or all fail."""
        mine = value if self._rank == 0 else None
        return cast("T", self.all_gather(mine, timeout_s=timeout_s, step=step)[0])

    def barrier(self, *, timeout_s: float, step: str) -> None:
        """Return when every rank has come."""
        self.all_gather(None, timeout_s=timeout_s, step=step)

    def close(self) -> None:
        """Leave. A rank that waits for this one, now or later, hears at once that it is gone."""
        if self._failure is None:
            self._failure = GroupRefused("this group is closed")
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encoded(self, value: object) -> bytes:
        data = encode(value)
        if len(data) > MAX_VALUE_BYTES:
            raise TypeError(f"a value of {len(data)} bytes; at most {MAX_VALUE_BYTES} may cross")
        return data

    def _meet(self, mine: bytes, timeout_s: float, step: str) -> list[object]:
        deadline = time.monotonic() + timeout_s
        if self._rank == 0:
            return _Hub(self._links, self._nodes, self._number, step).meet(
                mine, deadline, timeout_s
            )
        return self._ask(mine, deadline, timeout_s, step)

    def _ask(self, mine: bytes, deadline: float, timeout_s: float, step: str) -> list[object]:
        """A rank other than 0: send the value and wait for what rank 0 makes of it."""
        link = self._links[0]
        head = encode((self._number, step))
        link.put(FrameKind.VALUE, joined([head, mine]))
        gave_up = False
        while True:
            try:
                frame = link.frame()
            except LinkClosed as error:
                raise RankLost(step, (0,), self._nodes[:1], f"it is gone: {error}") from error
            if frame is not None:
                if frame[0] is FrameKind.FAILURE:
                    raise failure_in(frame[1])
                return _values(frame[1], step)
            if time.monotonic() >= deadline:
                if gave_up:
                    why = f"did not answer within {timeout_s:g} s; it is busy elsewhere, or stopped"
                    raise RankLost(step, (0,), self._nodes[:1], why)
                gave_up, deadline = True, time.monotonic() + GRACE_S
                link.put(FrameKind.GIVE_UP, joined([head, encode(timeout_s)]))
            wait_for_news([link], deadline)

    def _hang_up(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.close()


class _Hub:
    """Rank 0's side of one collective."""

    def __init__(
        self, links: dict[int, Link], nodes: tuple[str, ...], number: int, step: str
    ) -> None:
        self._links = links
        self._nodes = nodes
        self._number = number
        self._step = step
        self._parts: dict[int, bytes] = {}

    def meet(self, mine: bytes, deadline: float, timeout_s: float) -> list[object]:
        """Collect, and send the outcome to all."""
        self._parts[0] = joined([encode((self._number, self._step)), mine])
        try:
            while len(self._parts) < len(self._nodes):
                self._take()
                missing = self._missing()
                if missing and time.monotonic() >= deadline:
                    raise self._lost(missing, f"did not come within {timeout_s:g} s")
                if missing:
                    wait_for_news(self._links.values(), deadline)
        except VolumeError as error:
            self._send(FrameKind.FAILURE, encode(error), time.monotonic() + GRACE_S)
            raise
        body = joined(self._parts[rank] for rank in range(len(self._nodes)))
        # Whoever dies from here on is found in the next collective: this one has succeeded for all that came.
        self._send(FrameKind.RESULT, body, deadline)
        return _values(body, self._step)

    def _take(self) -> None:
        """Take what has come; raise if somebody is gone or gave up."""
        gone: dict[int, str] = {}
        for rank, link in self._links.items():
            try:
                while frame := link.frame():
                    kind, body = frame
                    if kind is FrameKind.GIVE_UP:
                        gave_up = f"gave up after {decode(split(body)[1]):g} s"
                        raise self._lost(
                            self._missing() or {rank}, f"did not come; rank {rank} {gave_up}"
                        )
                    self._parts[rank] = body
            except LinkClosed as error:
                if rank not in self._parts:
                    gone[rank] = str(error)
        if gone:
            raise self._lost(set(gone), f"is gone: {next(iter(gone.values()))}")

    def _missing(self) -> set[int]:
        return set(range(len(self._nodes))) - self._parts.keys()

    def _lost(self, ranks: set[int], why: str) -> RankLost:
        who = tuple(sorted(ranks))
        return RankLost(self._step, who, tuple(self._nodes[rank] for rank in who), why)

    def _send(self, kind: FrameKind, body: bytes, until: float) -> None:
        """Send to all; until then, wait for those that take it slowly."""
        for link in self._links.values():
            if link.closed is None:
                link.put(kind, body)
        while any(link.unsent for link in self._links.values()) and time.monotonic() < until:
            wait_for_news(self._links.values(), until)


def _values(body: bytes, step: str) -> list[object]:
    """The values of a result, if all ranks were at the same step."""
    parts = [split(part) for part in split(body)]
    steps = {rank: tuple(decode(part[0])) for rank, part in enumerate(parts)}
    assert len(set(steps.values())) == 1, f"{step}: the ranks took different paths: {steps}"
    return [decode(part[1]) for part in parts]


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise GroupRefused(f"address {address!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _process() -> str:
    return f"{socket.gethostname()} process {os.getpid()}"
