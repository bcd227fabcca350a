"""A serving manager, and what its tests ask it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
from lilo_engine.sampling.manager import SamplingManager
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim

from tests.sampling.words import request

ANYBODY = Claim()
ENDLESS = {"n": 64, "max_tokens": 1000}
"""Takes long enough on every engine to be caught running."""


@asynccontextmanager
async def running(definition, launcher, **options):
    """A manager that is serving."""
    manager = SamplingManager(definition=definition, launcher=launcher, **options)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.run)
            await anyio.wait_all_tasks_blocked()
            yield manager
            tasks.cancel_scope.cancel()


def submit(
    manager, seq_id, *, session_id="s", fingerprint="f", adapter=None, claim=ANYBODY, **keywords
):
    return manager.submit(
        session_id=session_id,
        seq_id=seq_id,
        fingerprint=fingerprint,
        adapter=adapter,
        request=request(**keywords),
        claim=claim,
    )


async def caught_running(manager):
    """Return once the engine has a request in hand."""
    while not ((state := await manager.state()).health and state.health.running):
        await anyio.lowlevel.checkpoint()


async def answer(manager, seq_id, **keywords):
    return await manager.retrieve(submit(manager, seq_id, **keywords).request_id, 30)


def versions(tmp_path, count) -> list[AdapterVersion]:
    """Adapters for the memory engine: any two files."""
    found = []
    for i in range(count):
        folder = tmp_path / f"v{i}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes([i]))
        found.append(AdapterVersion(name=f"v{i}", folder=str(folder)))
    return found
