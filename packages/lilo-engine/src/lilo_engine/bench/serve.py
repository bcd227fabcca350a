"""Serve: main of the server that is measured: `python -m lilo_engine.bench.serve FOLDER SLOTS`. Not for people.

Front and engine as `lilo serve` has them, with the null backend in a process of its own behind the bridge and a sampler
in memory. Prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import anyio
import anyio.to_thread
from lilo_definitions import Definition, get

from lilo_engine.app import build_app
from lilo_engine.cli.listener import listen, url_of
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.config import DataFolder
from lilo_engine.parts import Parts, open_control
from lilo_engine.requests.web_server import WebServer
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
    app = build_app(parts)
    listener, server = listen("127.0.0.1", 0), WebServer(app, app.state.front.polls)
    sys.stdout.write(f"{url_of(listener)}\n")
    sys.stdout.flush()

    async def end_with_input() -> None:
        await anyio.to_thread.run_sync(sys.stdin.read)
        server.stop()

    beside = (server.stop_on_signal, end_with_input)
    anyio.run(server.run, listener, *beside, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
