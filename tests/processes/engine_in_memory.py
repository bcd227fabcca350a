"""An engine in a process of its own, as `lilo engine tiny`, but with trainer and sampler in memory. Not a test.

    python -m tests.processes.engine_in_memory DATA_DIR [RECORDS_URL]

Prints `lilo: engine of tiny at URL, epoch N`, as `lilo engine` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from lilo_engine.app import EngineApp
from lilo_engine.cli.listener import listen, url_of
from lilo_engine.cli.place import this_server
from lilo_engine.cli.problems import problems_in_one_line
from lilo_engine.config import DataFolder
from lilo_engine.control.lease import Lease
from lilo_engine.control.records import Records
from lilo_engine.requests.web_server import WebServer

from tests.processes import in_memory


def main(root: str, url: str | None = None) -> None:
    data = DataFolder(root=Path(root))
    data.create()
    with problems_in_one_line(), listen("127.0.0.1", 0) as listener:
        records = Records.at(data.root, url)
        lease = Lease.take(records, this_server("lilo engine tiny"), address=url_of(listener))
        app = EngineApp.of(in_memory.parts(data, records, lease))
        server = WebServer(app.asgi, app.polls)

        async def announce() -> None:
            while True:
                if server.started and (await app.engine.state()).phase == "serving":
                    break
                await anyio.sleep(0.01)
            print(f"lilo: engine of tiny at {url_of(listener)}, epoch {lease.epoch}", flush=True)

        async def watch_lease() -> None:
            await lease.lost.wait()
            server.fail(f"this engine stops: {lease.reason}")

        beside = (server.stop_on_signal, announce, watch_lease)
        anyio.run(server.run, listener, *beside, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
