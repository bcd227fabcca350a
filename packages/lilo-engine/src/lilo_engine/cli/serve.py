"""`lilo serve DEFINITION`: the trainer, the sampler and the HTTP side, until Ctrl-C or SIGTERM.

Prints `lilo: serving DEFINITION at URL` when a model could be created; the health check answers 200 from then on.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import anyio
import typer
from lilo_definitions import get

from lilo_engine.app import build_app
from lilo_engine.cli.admission import admit
from lilo_engine.cli.listener import listen, url_of
from lilo_engine.cli.options import DefinitionName, Host, Port
from lilo_engine.cli.place import data_folder, locked, this_server
from lilo_engine.cli.problems import problems_in_one_line
from lilo_engine.cli.ray_option import RayAddress, use_ray
from lilo_engine.config import API_KEY_VARIABLE, api_key_from_environment, keep_kernels
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from lilo_engine.parts import Parts, ServerSettings
from lilo_engine.requests.front import Front
from lilo_engine.requests.web_server import WebServer

READY_LOOK_S = 0.05
"""Between looks for readiness: the trainer and the sampler become ready on their own."""
DEFAULT_PORT = 8010


def serve(
    definition: DefinitionName,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
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
    ray: RayAddress = None,
) -> None:
    """Serve a definition until Ctrl-C."""
    with problems_in_one_line():
        use_ray(ray)
        chosen = get(definition)
        data = data_folder(data_dir)
        if chosen.topology.device == "cuda":
            keep_kernels(data)
        with locked(data), listen(host, port) as listener:
            records = Records.at(data.root)
            lease = Lease.take(records, this_server(f"lilo serve {chosen.name}"))
            parts = Parts.of_processes(chosen, data, ServerSettings(), records, lease)
            given = api_key or api_key_from_environment()
            admit(parts.control.keys, host, given, api_key_file)
            _run(parts, lease, listener)


def _run(parts: Parts, lease: Lease, listener: socket.socket) -> None:
    app = build_app(parts)
    front: Front = app.state.front
    server = WebServer(app, front.polls)

    async def announce() -> None:
        """Say once that the server is ready, or end it when it never will be. Ended by its group."""
        while not (server.started and (await front.readiness()).ready):  # two processes
            state = await front.engine.state()
            if state.phase == "stopped":
                cause = state.last_failure or "it stopped"
                server.fail(f"the trainer of {parts.definition.name} could not be started: {cause}")
                return
            await anyio.sleep(READY_LOOK_S)
        print(f"lilo: serving {parts.definition.name} at {url_of(listener)}", flush=True)

    async def watch_lease() -> None:
        await lease.lost.wait()
        server.fail(f"this server stops: {lease.reason}")

    beside = (server.stop_on_signal, announce, watch_lease)
    anyio.run(server.run, listener, *beside, backend_options={"use_uvloop": True})
