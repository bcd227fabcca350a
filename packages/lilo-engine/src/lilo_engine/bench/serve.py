"""Serve: main of the server that is measured: `python -m lilo_engine.bench.serve FOLDER SLOTS`. Not for people.

An ordinary front and engine, with the null backend in a process of its own behind the bridge and a sampler in
memory. Prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from lilo_definitions import Definition, get

from lilo_engine.app import build_app
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.config import DataFolder
from lilo_engine.parts import Parts, open_control
from lilo_engine.sampling.launcher import MemorySamplerLauncher

KEY = "tml-bench"
CONTEXT = 262144
"""Tokens; the long requests have 250,000."""


def definition(slots: int) -> Definition:
    """`tiny` with a long context, for a backend that never runs it."""
    return get("tiny").derive(
        name="bench",
        context=CONTEXT,
        model={"context": CONTEXT},
        lora={"slots": slots},
        limits={"max_tokens_per_rank": CONTEXT},
    )


def main() -> None:
    """Serve until standard input ends."""
    folder, slots = Path(sys.argv[1]), int(sys.argv[2])
    served, data = definition(slots), DataFolder(root=folder)
    data.create()
    control = open_control(data)
    control.keys.create("bench", time.time(), key=KEY)
    parts = Parts(
        definition=served,
        data=data,
        launcher=ProcessLauncher(
            definition=served,
            checkpoints_root=data.checkpoints,
            log_path=data.logs / "backend.log",
            backend="null",
        ),
        sampler_launcher=MemorySamplerLauncher(served),
        control=control,
    )
    anyio.run(_serve, build_app(parts), backend_options={"use_uvloop": True})


async def _serve(app: FastAPI) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [listener])
        await anyio.to_thread.run_sync(sys.stdin.read)
        # What waits is answered, as `lilo serve` does at its end.
        app.state.front.polls.end()
        server.should_exit = True


if __name__ == "__main__":
    main()
