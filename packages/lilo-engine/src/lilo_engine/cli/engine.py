"""`lilo engine DEFINITION`: the trainer and the sampler for fronts in other processes (`lilo front`), until Ctrl-C or SIGTERM.

Prints `lilo: engine of DEFINITION at URL, epoch N` when a model could be created. Fronts find it by its records, and know its
secret from there.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import anyio
import typer
from lilo_definitions import get

from lilo_engine.app import EngineApp
from lilo_engine.cli.listener import listen, url_of
from lilo_engine.cli.options import CheckpointsFolder, DefinitionName, Host, Port, RecordsUrl
from lilo_engine.cli.place import data_folder, records_url_without_password, this_server
from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.cli.ray_option import RayAddress, use_ray
from lilo_engine.config import keep_kernels
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from lilo_engine.parts import Parts, ServerSettings
from lilo_engine.requests.web_server import WebServer

READY_LOOK_S = 0.05
"""Between looks for readiness: the trainer and the sampler become ready on their own."""
DEFAULT_PORT = 8011
_EVERYWHERE = ("0.0.0.0", "::")


def engine(
    definition: DefinitionName,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    address: Annotated[
        str | None,
        typer.Option(
            help="URL at which fronts reach it, if not the one it listens on.", show_default=False
        ),
    ] = None,
    records: RecordsUrl = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keeps logs, and what is not elsewhere.", show_default=False)
    ] = None,
    checkpoints: CheckpointsFolder = None,
    ray: RayAddress = None,
) -> None:
    """Run the trainer and the sampler for fronts, until Ctrl-C."""
    with problems_in_one_line():
        use_ray(ray)
        chosen = get(definition)
        url = records_url_without_password(records)
        data = data_folder(data_dir, checkpoints)
        if chosen.topology.device == "cuda":
            keep_kernels(data)
        with listen(host, port) as listener:
            if address is None and listener.getsockname()[0] in _EVERYWHERE:
                raise Problem(
                    f"fronts cannot reach {host}; name the URL at which they do with --address"
                )
            opened = Records.at(data.root, url)
            lease = Lease.take(
                opened,
                this_server(f"lilo engine {chosen.name}"),
                address=address or url_of(listener),
            )
            parts = Parts.of_processes(chosen, data, ServerSettings(), opened, lease)
            _run(EngineApp.of(parts), lease, listener, address or url_of(listener))


def _run(app: EngineApp, lease: Lease, listener: socket.socket, address: str) -> None:
    server = WebServer(app.asgi, app.polls)
    name = app.parts.definition.name

    async def announce() -> None:
        """Say once that the engine is ready, or end it when it never will be. Ended by its group."""
        while True:
            trainer, sampler = await app.engine.state(), await app.sampling.state()
            if server.started and trainer.phase == sampler.phase == "serving":
                break
            if trainer.phase == "stopped":
                cause = trainer.last_failure or "it stopped"
                server.fail(f"the trainer of {name} could not be started: {cause}")
                return
            await anyio.sleep(READY_LOOK_S)
        print(f"lilo: engine of {name} at {address}, epoch {lease.epoch}", flush=True)

    async def watch_lease() -> None:
        await lease.lost.wait()
        server.fail(f"this engine stops: {lease.reason}")

    beside = (server.stop_on_signal, announce, watch_lease)
    anyio.run(server.run, listener, *beside, backend_options={"use_uvloop": True})
