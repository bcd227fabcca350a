"""`lilo serve DEFINITION`: the trainer, the sampler and the HTTP side, until Ctrl-C or SIGTERM.

Prints `lilo: serving DEFINITION at URL` when a model could be created; the health check answers 200 from then on.
"""

from __future__ import annotations

import errno
import signal
import socket
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import anyio
import typer
import uvicorn
from filelock import FileLock, Timeout
from lilo_definitions import get

from lilo_engine.app import Parts, ServerSettings, build_app
from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.config import (
    API_KEY_VARIABLE,
    DataFolder,
    api_key_from_environment,
    default_data_dir,
)
from lilo_engine.control.keys import Keys
from lilo_engine.requests.front import Front

GRACE_S = 3
"""For requests in flight at the end; long polls are answered before it."""
READY_LOOK_S = 0.05
"""Between looks for readiness: the trainer and the sampler become ready on their own."""
DEFAULT_PORT = 8010


def serve(
    definition: Annotated[str, typer.Argument(help="As `lilo definitions list` shows it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = DEFAULT_PORT,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keeps records and checkpoints.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"Accept this key (tml-...), which the process list shows; {API_KEY_VARIABLE} and a file do not.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Accept the key in this file; made if missing.", show_default=False),
    ] = None,
) -> None:
    """Serve a definition until Ctrl-C."""
    with problems_in_one_line():
        chosen = get(definition)
        data = DataFolder(root=data_dir or default_data_dir())
        _create(data)
        with _locked(data), _listener(host, port) as listener:
            parts = Parts.of_processes(chosen, data, ServerSettings())
            given = api_key or api_key_from_environment()
            _admit(parts.control.keys, host, given, api_key_file)
            _run(parts, listener, _url(listener))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal after an orderly stop."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to `_stop_on_signal`."""
        yield


async def _stop_on_signal(server: uvicorn.Server, front: Front) -> None:
    """The first Ctrl-C or SIGTERM stops in order, the second does not wait for requests in flight."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            server.force_exit = server.should_exit
            server.should_exit = True
            front.polls.end()


def _run(parts: Parts, listener: socket.socket, url: str) -> None:
    app = build_app(parts)
    config = uvicorn.Config(
        app,
        access_log=False,
        # Nothing here asks where a request came from.
        proxy_headers=False,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
        backlog=2048,
    )
    server = _Server(config)
    front: Front = app.state.front
    failures: list[str] = []

    async def announce() -> None:
        """Say once that the server is ready, or end it when it never will be. Ended by its group."""
        while not (server.started and (await front.readiness()).ready):  # two processes
            state = await front.engine.state()
            if state.phase == "stopped" and not server.should_exit:
                failures.append(state.last_failure or "it stopped")
                server.should_exit = True
                return
            await anyio.sleep(READY_LOOK_S)
        print(f"lilo: serving {parts.definition.name} at {url}", flush=True)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signal, server, front)
            tasks.start_soon(announce)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()

    anyio.run(main, backend_options={"use_uvloop": True})
    if failures:
        raise Problem(f"the trainer of {parts.definition.name} could not be started: {failures[0]}")


def _create(data: DataFolder) -> None:
    try:
        data.create()
    except OSError as error:
        raise Problem(
            f"the data folder {data.root} cannot be used: {error.strerror or error}; "
            "choose another with --data-dir"
        ) from error


def _locked(data: DataFolder) -> AbstractContextManager[object]:
    """The lock of the folder, held until the context ends."""
    try:
        return FileLock(data.lock).acquire(timeout=0)
    except Timeout as error:
        raise Problem(
            f"another server uses the data folder {data.root}; stop it, or choose another with --data-dir"
        ) from error


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Listening from now on: a second server on the port fails, and early clients wait instead of failing.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        way = "choose another --port, or 0 for a free one"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            way = "choose a --host that is an address of this machine"
        raise Problem(
            f"cannot listen on {host} port {port}: {error.strerror or error}; {way}"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _admit(keys: Keys, host: str, given: str | None, file: Path | None) -> None:
    """Accept the given key; without any, make one and print it once."""
    if file is not None and file.exists():
        given = file.read_text("utf-8").strip()
    if given is not None:
        keys.create("given at start", time.time(), key=given, operator=True)
        return
    if file is not None:
        _write_private(file, keys.create("made at start", time.time(), operator=True))
        return
    if keys.any():
        return
    if not _is_loopback(host):
        raise Problem(
            f"{host} can be reached from other machines and there is no API key yet; make one with "
            f"`lilo keys create`, or give one with --api-key, --api-key-file or {API_KEY_VARIABLE}"
        )
    made = keys.create("made at start", time.time(), operator=True)
    print(f"lilo: API key (shown once): {made}", flush=True)


def _write_private(file: Path, key: str) -> None:
    file.touch(mode=0o600)
    file.write_text(f"{key}\n", "utf-8")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
