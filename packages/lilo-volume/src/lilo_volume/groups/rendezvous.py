"""Rendezvous: how the ranks of a `TcpGroup` find rank 0 and each other, and prove that they know the token.

Both sides answer the other's random challenge with an HMAC-SHA256 under the shared token, which itself never crosses.
That keeps strangers out; it does not encrypt, so the network between the nodes must be trusted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, cast

from lilo_volume.errors import GroupRefused, RankLost, VolumeError
from lilo_volume.groups.codec import Undecodable, decode, encode
from lilo_volume.groups.link import GRACE_S, FrameKind, Link, LinkClosed, wait_for_news
from lilo_volume.log import warn

_STEP = "rendezvous"
_HELLO = "lilo-volume group 1"
_RETRY_S = 0.02
"""Between tries to reach a rank 0 that does not listen yet: connecting has no event to wait for."""
_MAX_STRANGERS = 64
"""Connections beyond the ranks' own that may be in their handshake at once; more are dropped, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """How a rank introduces itself."""

    rank: int
    world_size: int
    node: str
    process: str
    """Host and process id, for the table of who came."""


class _NotReady(Exception):
    """Rank 0 hung up without a reason: an older run's, or one that is just ending."""


@dataclass(slots=True)
class _Guest:
    """A connection that rank 0 has accepted."""

    link: Link
    challenge: str
    who: Who | None = None


def listen(host: str, port: int) -> socket.socket:
    """The socket that rank 0 waits on.

    Raises:
        GroupRefused: the address cannot be had; another rank 0 may have it.
    """
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise GroupRefused(f"cannot listen at {host}:{port}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise GroupRefused(
            f"cannot listen at {host}:{port}: {error}; does another process believe that it is rank 0?"
        ) from error
    return sock


def receive_ranks(
    listener: socket.socket, me: Who, token: bytes, deadline: float
) -> tuple[dict[int, Link], tuple[str, ...]]:
    """Rank 0: wait for all others; their links by rank, and the node of each rank. Closes `listener`.

    Raises:
        RankLost: some did not come; those that did get the same error.
        GroupRefused: two claim the same rank, or the sizes differ; likewise.
    """
    guests: list[_Guest] = []
    listener.setblocking(False)
    with listener:
        while len(_arrived(guests, me)) < me.world_size:
            ready = wait_for_news([guest.link for guest in guests], deadline, listener)
            if ready:
                _accept(listener, guests, me.world_size)
            for guest in list(guests):
                if not _attend(guest, me, token):
                    guests.remove(guest)
            try:
                _check_table([me, *(g.who for g in guests if g.who is not None)])
                _check_time(guests, me, deadline)
            except VolumeError as error:
                _send_home(guests, error)
                raise
    return _seat(guests, me)


def _seat(guests: list[_Guest], me: Who) -> tuple[dict[int, Link], tuple[str, ...]]:
    """All have come: tell them who is where, and let strangers go."""
    nodes = [me.node] * me.world_size
    links: dict[int, Link] = {}
    for guest in guests:
        if guest.who is None:
            guest.link.close()
        else:
            links[guest.who.rank] = guest.link
            nodes[guest.who.rank] = guest.who.node
    for link in links.values():
        link.put(FrameKind.RESULT, encode(tuple(nodes)))
    return links, tuple(nodes)


def _arrived(guests: list[_Guest], me: Who) -> set[int]:
    return {me.rank, *(guest.who.rank for guest in guests if guest.who is not None)}


def _accept(listener: socket.socket, guests: list[_Guest], world_size: int) -> None:
    try:
        sock, _ = listener.accept()
    except OSError:
        return  # it went away again
    guest = _Guest(Link(sock), secrets.token_hex(32))
    hello = {"hello": _HELLO, "challenge": guest.challenge}
    guest.link.put(FrameKind.GREETING, json.dumps(hello).encode("ascii"))
    guests.append(guest)
    strangers = [other for other in guests if other.who is None]
    if len(strangers) > world_size + _MAX_STRANGERS:
        strangers[0].link.close()


def _attend(guest: _Guest, me: Who, token: bytes) -> bool:
    """Take the guest's next step in the handshake; whether it may stay."""
    try:
        frame = guest.link.frame()
        if frame is None:
            return True
        if guest.who is not None:
            raise LinkClosed("it spoke before it was asked")
        reply = json.loads(frame[1])
        who = Who(**reply["who"])
        proof = _proof(token, "rank", guest.challenge, reply["challenge"], who)
        if not hmac.compare_digest(proof, reply["proof"]):
            guest.link.put(FrameKind.FAILURE, encode(GroupRefused(_WRONG_TOKEN)))
            raise LinkClosed("it does not know the token")
    except (LinkClosed, ValueError, TypeError, KeyError, RecursionError) as error:
        warn("group: a connection was turned away: %s", error)
        guest.link.close()
        return False
    greeting = {"proof": _proof(token, "rank 0", reply["challenge"], guest.challenge, me)}
    guest.link.put(FrameKind.GREETING, json.dumps({**greeting, "who": asdict(me)}).encode("ascii"))
    guest.who = who
    return True


_WRONG_TOKEN = "the token is not that of rank 0; every rank needs the same"


def _check_table(came: list[Who]) -> None:
    ranks = [who.rank for who in came]
    size = came[0].world_size
    good = len(set(ranks)) == len(ranks) and all(0 <= rank < size for rank in ranks)
    if good and all(who.world_size == size for who in came):
        return
    table = "; ".join(
        f"rank {who.rank} of {who.world_size} on node {who.node} ({who.process})" for who in came
    )
    raise GroupRefused(
        f"the ranks do not make up a group of {size}: each needs a rank of its own from 0 to {size - 1} and the "
        f"same world size; there came: {table}"
    )


def _check_time(guests: list[_Guest], me: Who, deadline: float) -> None:
    missing = tuple(sorted(set(range(me.world_size)) - _arrived(guests, me)))
    if missing and time.monotonic() >= deadline:
        raise RankLost(_STEP, missing, ("",) * len(missing), "did not come to the rendezvous")


def _send_home(guests: list[_Guest], error: VolumeError) -> None:
    for guest in guests:
        if guest.who is not None:
            guest.link.put(FrameKind.FAILURE, encode(error))
        guest.link.close()


def reach_rank_zero(
    host: str, port: int, me: Who, token: bytes, deadline: float
) -> tuple[Link, tuple[str, ...]]:
    """Another rank: connect to rank 0, prove the token, wait for all others; the link, and each rank's node.

    Raises:
        RankLost: rank 0 could not be reached, or others did not come.
        GroupRefused: rank 0 does not want this rank, or is not who it should be.
    """
    why = "it does not listen"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(
                (host, port), max(0.01, deadline - time.monotonic())
            ) as s:
                if s.getsockname() == s.getpeername():
                    raise OSError("it was this socket itself that answered")
                link = Link(s.dup())
        except OSError as error:
            why = f"{host}:{port}: {error}"
        else:
            try:
                return link, _introduce(link, me, token, deadline)
            except _NotReady as error:
                why = str(error)
            except BaseException:
                link.close()
                raise
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise RankLost(_STEP, (0,), ("",), f"could not be reached in time: {why}")


def _introduce(link: Link, me: Who, token: bytes, deadline: float) -> tuple[str, ...]:
    hello = _greeting(link, deadline)
    if hello.get("hello") != _HELLO:
        raise GroupRefused(f"something else than a lilo-volume group answers: {str(hello)[:100]}")
    mine, theirs = secrets.token_hex(32), str(hello.get("challenge"))
    mine_proof = _proof(token, "rank", theirs, mine, me)
    reply = {"who": asdict(me), "challenge": mine, "proof": mine_proof}
    link.put(FrameKind.GREETING, json.dumps(reply).encode("ascii"))
    answer = _greeting(link, deadline)
    try:
        proof = _proof(token, "rank 0", mine, theirs, Who(**answer["who"]))
        known = hmac.compare_digest(proof, str(answer["proof"]))
    except (KeyError, TypeError):
        known = False
    if not known:
        raise GroupRefused("who answers as rank 0 does not know the token")
    link.limit_bytes = 2**31
    kind, body = _next(link, deadline + GRACE_S)
    assert kind is FrameKind.RESULT, f"rank 0 sent {kind!r} instead of the table of nodes"
    return decode(body)


def _greeting(link: Link, deadline: float) -> dict[str, Any]:
    _, body = _next(link, deadline)
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise GroupRefused("something else than a lilo-volume group answers")
    return cast("dict[str, Any]", value)


def _next(link: Link, deadline: float) -> tuple[FrameKind, bytes]:
    """The next frame; a failure is raised."""
    while True:
        try:
            frame = link.frame()
        except LinkClosed as error:
            raise _NotReady(str(error)) from error
        if frame is None:
            if time.monotonic() >= deadline:
                raise RankLost(_STEP, (0,), ("",), "did not finish the rendezvous in time")
            wait_for_news([link], deadline)
            continue
        if frame[0] is FrameKind.FAILURE:
            raise failure_in(frame[1])
        return frame


def failure_in(body: bytes) -> VolumeError:
    """The error that a failure frame brings."""
    try:
        error = decode(body)
    except Undecodable as broken:
        error = broken
    return error if isinstance(error, VolumeError) else GroupRefused(f"rank 0 failed: {error}")


def _proof(token: bytes, role: str, first: str, second: str, who: Who) -> str:
    text = json.dumps([_HELLO, role, first, second, asdict(who)])
    return hmac.new(token, text.encode("ascii"), "sha256").hexdigest()
