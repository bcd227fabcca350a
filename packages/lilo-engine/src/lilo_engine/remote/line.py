"""Line: calls from a front to whichever engine holds the lease.

    find (records) -> address -> one HTTP request per call -> value or error
                        ^                 |
                        +--- broken, or another engine: look again, send again

Every call may be sent again, because all of them may be at the other side (`engine_client.py`, `sampling_client.py`).
When the address changes, calls that wait for the old one are cut off and sent to the new one: an engine that was
stopped never answers. Not what the calls mean: that is `client.py`.
"""

from __future__ import annotations

import itertools
import logging
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anyio
import httpx

from lilo_engine.commands import frames
from lilo_engine.errors import LiloError, Unavailable
from lilo_engine.remote.calls import EPOCH_HEADER, MEDIA_TYPE, PREFIX, Hello

_log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""For an engine that is away: one that is started again on the same machine is back by then."""
ANSWER_S = 30.0
"""For an answer that nothing holds up, beside the time that a call asks to wait."""
LOOK_S = 1.0
"""Between looks at who the engine is: how long calls may hang on one that was stopped and replaced."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
"""Between tries; each is twice the one before."""
_CONNECT_S = 2.0
_POOLS = 65
"""Of connections: a pool looks at all of its own for each request, which thousands of waiting polls would make slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the engine is."""

    url: str
    epoch: int
    secret: str


class EngineAway(Unavailable):
    """No engine answers; the message says for how long and why."""


class _BrokenError(Exception):
    """This try came to nothing; the next one may not."""


@dataclass(slots=True, eq=False, kw_only=True)
class Line:
    """The line of one front."""

    find: Callable[[], Awaitable[Address]]
    """Reads who the engine is.

    Raises:
        Unavailable: there is none, or the records cannot be read.
    """
    pools: Sequence[httpx.AsyncClient]
    """The first is for calls that are answered at once, the others for those that wait, in turn."""
    _turn: Iterator[int] = field(default_factory=itertools.count)
    _address: Address | None = None
    _waiting: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])
    """Calls that wait for an answer from `_address`."""
    _away_since_s: float | None = None
    _met: Hello | None = None
    """What the first engine said of itself: later ones must say the same."""
    _met_epoch: int | None = None

    @property
    def epoch(self) -> int | None:
        """Of the engine that is talked to; None before the first call."""
        return None if self._address is None else self._address.epoch

    @property
    def away_s(self) -> float:
        """For how long no engine has answered; 0 = the last one that was asked did."""
        return 0.0 if self._away_since_s is None else anyio.current_time() - self._away_since_s

    async def watch(self) -> None:
        """See who the engine is until cancelled, so that no call hangs on one that was replaced."""
        while True:
            await anyio.sleep(LOOK_S)
            try:
                await self.look()
            except Unavailable as error:
                _log.debug("who the engine is cannot be seen: %s", error)

    async def look(self) -> None:
        """See once who the engine is.

        Raises:
            Unavailable: there is none, or the records cannot be read.
        """
        self._move(await self.find())

    async def call(
        self, method: str, *args: object, wait_s: float = 0.0, patience_s: float = PATIENCE_S
    ) -> Any:  # noqa: ANN401 - the caller knows what it asked for
        """Call a method of the engine's process, again and again while the line is broken.

        Args:
            method: as in `calls.py`.
            args: what frames can carry.
            wait_s: how long the other side may take because it was asked to.
            patience_s: how long to try.

        Raises:
            EngineAway: no engine answered for `patience_s`.
            LiloError: what the method raised.
        """
        body = frames.encode(args)
        ends_s, pause_s = anyio.current_time() + patience_s, _FIRST_PAUSE_S
        while True:
            try:
                value = await self._try(method, body, wait_s)
                self._away_since_s = None
            except (_BrokenError, Unavailable) as error:
                now_s = anyio.current_time()
                self._away_since_s = self._away_since_s or now_s
                if now_s >= ends_s:
                    raise EngineAway(
                        f"no engine has answered for {self.away_s:.0f} s ({error}); try again later"
                    ) from error
                await anyio.sleep(min(pause_s, ends_s - now_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if isinstance(value, LiloError):
                raise value
            return value

    async def _try(self, method: str, body: bytes, wait_s: float) -> Any:  # noqa: ANN401
        address = self._address
        if address is None:
            address = await self.find()
            self._move(address)
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                if self._met_epoch != address.epoch:
                    self._meet(await self._ask(address, "hello", frames.encode(()), 0.0))
                    self._met_epoch = address.epoch
                return await self._ask(address, method, body, wait_s)
            except _BrokenError:
                if self._address == address:
                    self._address = None
                raise
            finally:
                self._waiting.discard(scope)
        raise _BrokenError("another engine took its place")

    async def _ask(self, address: Address, method: str, body: bytes, wait_s: float) -> Any:  # noqa: ANN401
        limit = httpx.Timeout(ANSWER_S, connect=_CONNECT_S, read=wait_s + ANSWER_S, pool=None)
        headers = {
            "authorization": f"Bearer {address.secret}",
            "content-type": MEDIA_TYPE,
            EPOCH_HEADER: str(address.epoch),
        }
        url = f"{address.url}{PREFIX}/{method}"
        try:
            http = self._pool(waits=wait_s > 0)
            answer = await http.post(url, content=body, headers=headers, timeout=limit)
        except httpx.HTTPError as error:
            words = str(error) or type(error).__name__
            raise _BrokenError(f"the engine at {address.url} cannot be reached: {words}") from error
        if not answer.is_success:
            raise _BrokenError(
                f"{address.url} answered {answer.status_code}: {answer.text[:200] or 'nothing more'}"
            )
        try:
            return frames.decode(answer.content)
        except frames.FrameError as error:
            raise _BrokenError(f"{address.url} answered what is no frame: {error}") from error

    def _pool(self, *, waits: bool) -> httpx.AsyncClient:
        if not waits or len(self.pools) == 1:
            return self.pools[0]
        return self.pools[1 + next(self._turn) % (len(self.pools) - 1)]

    def _meet(self, hello: Hello) -> None:
        """See that an engine serves what this front was started for.

        Raises:
            Unavailable: it does not.
        """
        here = version("lilo-engine")
        if hello.version != here:
            raise Unavailable(
                f"the engine has version {hello.version} of lilo-engine, this front {here}; use one on both sides"
            )
        if self._met is not None and hello != self._met:
            raise Unavailable(
                "the engine serves another definition, or another model folder, than the one before; start this front again"
            )
        self._met = hello

    def _move(self, address: Address) -> None:
        """Talk to this engine from now on; calls to another one are cut off, to be sent again."""
        if address == self._address:
            return
        if self._address is not None:
            _log.warning("the engine is at %s now (epoch %d)", address.url, address.epoch)
            for scope in self._waiting:
                scope.cancel()
        self._address = address


@asynccontextmanager
async def open_line(find: Callable[[], Awaitable[Address]]) -> AsyncGenerator[Line]:
    """A line that is watched while the context lives."""
    # Every waiting poll of a client is a connection of its own, so that their number is not limited here.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30)
    trusted = ssl.create_default_context()
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        pools = [
            await stack.enter_async_context(
                httpx.AsyncClient(limits=limits, trust_env=False, verify=trusted)
            )
            for _ in range(_POOLS)
        ]
        line = Line(find=find, pools=pools)
        tasks.start_soon(line.watch)
        yield line
        tasks.cancel_scope.cancel()
