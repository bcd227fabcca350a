"""WebServer: one HTTP app, on a socket that was opened before, until it is told to stop or fails."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import TypeAlias

import anyio
import uvicorn
from starlette.types import ASGIApp

from lilo_engine.errors import ServerError
from lilo_engine.garbage import Garbage
from lilo_engine.requests.http_protocol import HttpProtocol
from lilo_engine.requests.long_polls import LongPolls

GRACE_S = 3
"""For requests in flight at the end; long polls are answered before it."""
SWITCH_S = 1e-3
"""For which a thread may go on when another wants to."""


Beside: TypeAlias = Callable[[], Coroutine[object, object, None]]


class WebServer:
    """Serves an app, with tasks of whoever runs it beside it."""

    def __init__(self, app: ASGIApp, polls: LongPolls) -> None:
        """Serve nothing yet.

        Args:
            app: its lifespan runs what it needs.
            polls: ended when the server stops.
        """
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            access_log=False,
            # Nothing here asks where a request came from.
            proxy_headers=False,
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,
            backlog=2048,
        )
        self._server = _Server(config)
        self._polls = polls
        self._failure: str | None = None

    @property
    def started(self) -> bool:
        """Whether requests are answered."""
        return self._server.started

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._server.should_exit

    @property
    def quiet(self) -> bool:
        """Whether nothing is asked just now but to be told when something happens."""
        return len(self._server.server_state.tasks) <= self._polls.num_waiting

    def stop(self) -> None:
        """End in order: what waits is answered now."""
        self._server.should_exit = True
        self._polls.end()

    def fail(self, why: str) -> None:
        """Stop, and say why; the first reason wins."""
        if not self.stopping:
            self._failure = why
        self.stop()

    async def run(self, listener: socket.socket, *beside: Beside) -> None:
        """Serve until told to stop; tasks beside it are cancelled then.

        Raises:
            ServerError: it stopped by a failure, in words for whoever started it.
        """
        # Threads that decode large requests let the event loop go on a millisecond after it asks, not five.
        sys.setswitchinterval(SWITCH_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Garbage(quiet=lambda: self.quiet).run)
            for task in beside:
                tasks.start_soon(task)
            await self._server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise ServerError(self._failure)

    async def stop_on_signal(self) -> None:
        """To run beside it: the first Ctrl-C or SIGTERM stops in order, the second does not wait for requests in flight."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                self._server.force_exit = self._server.should_exit
                self.stop()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal after an orderly stop."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to `stop_on_signal`, or to whoever runs the server."""
        yield
