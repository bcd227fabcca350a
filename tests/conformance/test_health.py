"""The health check before a server is ready."""

from __future__ import annotations

import httpx
import pytest
from lilo_definitions import get
from lilo_engine.app import Parts, build_app, open_control
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.config import DataFolder
from lilo_engine.sampling.launcher import MemorySamplerLauncher

pytestmark = pytest.mark.anyio


async def test_health_is_503_with_the_progress_until_trainer_and_sampler_are_ready(tmp_path):
    definition, data = get("tiny"), DataFolder(root=tmp_path)
    data.create()
    parts = Parts(
        definition=definition,
        data=data,
        launcher=MemoryLauncher(definition=definition, checkpoints_root=data.checkpoints),
        sampler_launcher=MemorySamplerLauncher(definition),
        control=open_control(data),
    )
    # The transport does not run the app's lifespan, so that nothing has been started.
    transport = httpx.ASGITransport(app=build_app(parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://lilo") as http:
        answer = await http.get("/api/v1/healthz")
    parts.control.records.close()
    assert answer.status_code == 503
    assert "trainer" in answer.json()["detail"]
    assert "sampler" in answer.json()["detail"]
