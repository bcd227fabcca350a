"""`lilo front`: the HTTP side alone, for an engine in another process (`lilo engine`), until Ctrl-C or SIGTERM.

Any number of them may run over the same records; clients may talk to all of them in turn. Prints
`lilo: serving DEFINITION at URL` when the engine is ready; the health check answers 200 from then on.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated

import anyio
import typer

from lilo_engine.app import build_front_app
from lilo_engine.cli.admission import admit
from lilo_engine.cli.listener import listen, url_of
from lilo_engine.cli.options import CheckpointsFolder, Host, Port, RecordsUrl
from lilo_engine.cli.place import data_folder, records_url_without_password
from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.config import (
    API_KEY_VARIABLE,
    api_key_from_environment,
)
from lilo_engine.control.control import Control
from lilo_engine.control.engine_address import EngineAddress
from lilo_engine.control.records import Records
from lilo_engine.errors import LiloError, ServerError
from lilo_engine.parts import FrontParts
from lilo_engine.remote.calls import Hello
from lilo_engine.remote.client import RemoteEngine
from lilo_engine.remote.line import open_line
from lilo_engine.requests.front import Front
from lilo_engine.requests.web_server import WebServer
from lilo_engine.storage import open_checkpoints

READY_LOOK_S = 0.2
"""Between looks at an engine that is not ready yet."""
FIRST_LOOK_S = 2.0
FIND_S = 60.0
"""For an engine that is started at the same time to take its lease."""
DEFAULT_PORT = 8010


def front(
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    engine: Annotated[
        str | None,
        typer.Option(
            help="URL of the engine, if not where its records say it is.", show_default=False
        ),
    ] = None,
    records: RecordsUrl = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The engine's, or one of its own.", show_default=False)
    ] = None,
    checkpoints: CheckpointsFolder = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"Accept the key in this file, or the one in {API_KEY_VARIABLE}; made if missing.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer clients for an engine in another process, until Ctrl-C."""
    with problems_in_one_line():
        url = records_url_without_password(records)
        data = data_folder(data_dir, checkpoints)
        with listen(host, port) as listener:
            opened = Records.of_engine(data.root, url)
            control = Control.of_front(opened, open_checkpoints(data.checkpoints), time.time)
            admit(control.keys, host, api_key_from_environment(), api_key_file)
            anyio.run(
                _run,
                control,
                EngineAddress(opened, engine),
                listener,
                backend_options={"use_uvloop": True},
            )


async def _run(control: Control, address: EngineAddress, listener: socket.socket) -> None:
    problem: Problem | ServerError | None = None
    async with open_line(address.find) as line:
        # Raised below: here it would be wrapped into a group.
        try:
            hello = await _met(RemoteEngine(line))
            await _serve(FrontParts(hello=hello, line=line, control=control), listener)
        except (Problem, ServerError) as error:
            problem = error
    if problem is not None:
        raise problem


async def _met(engine: RemoteEngine) -> Hello:
    """What the engine says of itself, once there is one.

    Raises:
        Problem: none came.
    """
    try:
        return await engine.hello(FIRST_LOOK_S)
    except LiloError as error:
        typer.echo(f"lilo: {error.message}; waiting for {FIND_S:g} s", err=True)
    try:
        return await engine.hello(FIND_S)
    except LiloError as error:
        raise Problem(error.message) from error


async def _serve(parts: FrontParts, listener: socket.socket) -> None:
    app = build_front_app(parts)
    front: Front = app.state.front
    server = WebServer(app, front.polls)

    async def announce() -> None:
        """Say once that the engine is ready. Ended by its group."""
        while True:
            readiness = await front.readiness()
            if server.started and readiness.ready:
                break
            await anyio.sleep(READY_LOOK_S)
        print(f"lilo: serving {front.definition.name} at {url_of(listener)}", flush=True)

    await server.run(listener, server.stop_on_signal, announce)
