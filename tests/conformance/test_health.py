"""The health check: before a server is ready, and what it says of progress."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import httpx
import pytest
from lilo_definitions import get
from lilo_engine.app import build_app
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.config import DataFolder
from lilo_engine.errors import Unavailable
from lilo_engine.parts import Parts, open_control
from lilo_engine.requests import front
from lilo_engine.sampling.launcher import MemorySamplerLauncher

pytestmark = pytest.mark.anyio


def memory_parts(folder, factory=MemoryBackend) -> Parts:
    definition, data = get("tiny"), DataFolder(root=folder)
    data.create()
    return Parts(
        definition=definition,
        data=data,
        launcher=MemoryLauncher(
            definition=definition, checkpoints_root=data.checkpoints, factory=factory
        ),
        sampler_launcher=MemorySamplerLauncher(definition),
        control=open_control(data),
    )


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://lilo")


async def ready(http) -> dict[str, object]:
    with anyio.fail_after(20):
        while (answer := await http.get("/api/v1/healthz")).status_code != 200:
            await anyio.lowlevel.checkpoint()
    return answer.json()


async def test_health_is_503_with_the_progress_until_trainer_and_sampler_are_ready(tmp_path):
    parts = memory_parts(tmp_path)
    # The transport does not run the app's lifespan, so that nothing has been started.
    async with client_of(build_app(parts)) as http:
        answer = await http.get("/api/v1/healthz")
    parts.control.records.close()
    assert answer.status_code == 503
    assert "trainer" in answer.json()["detail"]
    assert "sampler" in answer.json()["detail"]


async def test_health_names_the_last_progress_of_both_sides(tmp_path):
    app = build_app(memory_parts(tmp_path))
    async with app.router.lifespan_context(app), client_of(app) as http:
        body = await ready(http)
        assert body["status"] == "ok"
        assert body["trainer"]["completed_commands"] == 0
        assert body["trainer"]["last_command"] is None
        assert body["trainer"]["age_s"] >= 0
        assert body["trainer"]["silent_s"] == 0
        assert body["sampler"]["generated_tokens"] == 0


async def test_a_trainer_that_does_not_answer_is_serving_and_said_to_be_silent(
    tmp_path, monkeypatch
):
    class Silent(MemoryBackend):
        silent = False

        def health(self):
            if self.silent:
                raise Unavailable("no answer")
            return super().health()

    monkeypatch.setattr(front, "SILENT_S", 0.0)
    app = build_app(memory_parts(tmp_path, Silent))
    async with app.router.lifespan_context(app), client_of(app) as http:
        assert "not answered" not in (await ready(http))["detail"]
        monkeypatch.setattr(Silent, "silent", True)
        answer = await http.get("/api/v1/healthz")
        assert answer.status_code == 200
        assert answer.json()["trainer"]["silent_s"] > 0
        assert "not answered" in answer.json()["detail"]
