"""The line to an engine: what a front does while the engine is away, stopped, or another one than before."""

from __future__ import annotations

import socket
import time

import anyio
import anyio.to_thread
import pytest
from lilo_engine.config import DataFolder
from lilo_engine.control.engine_address import EngineAddress
from lilo_engine.errors import BackendLost, Unavailable
from lilo_engine.operations.operation import RequestId
from lilo_engine.operations.result import Failed, Pending
from lilo_engine.remote import client
from lilo_engine.remote.client import RemoteEngine, RemoteSampling, RemoteView
from lilo_engine.remote.line import Address, EngineAway, open_line

from tests.processes.conftest import engine_in_thread

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An engine, and where it is."""
    data = DataFolder(root=tmp_path_factory.mktemp("line"))
    data.create()
    with engine_in_thread(data) as app:
        yield EngineAddress(app.parts.control.records)


async def no_engine() -> Address:
    raise Unavailable("no engine runs over these records")


async def test_while_the_engine_is_away_futures_are_pending_and_at_last_fail(monkeypatch):
    async with open_line(no_engine) as away:
        engine, sampling = RemoteEngine(away), RemoteSampling(away, 1.0)
        for state in (
            await engine.retrieve(RequestId("m:1"), 0.1),
            await sampling.retrieve("sample:s:1", 0.1),
        ):
            assert isinstance(state, Pending)
            assert state.queue_state == "paused_capacity"
            assert "no engine runs" in (state.reason or "")
        monkeypatch.setattr(client, "GIVE_UP_S", 0.1)
        state = await engine.retrieve(RequestId("m:1"), 0.1)
        assert isinstance(state, Failed)
        assert isinstance(state.error, BackendLost)
        assert await RemoteView(away).metrics() == ""


async def test_a_submission_to_an_engine_that_stays_away_is_to_be_tried_again():
    async with open_line(no_engine) as away:
        with pytest.raises(EngineAway, match="no engine runs"):
            await away.call("submit", patience_s=0.2)


async def test_a_call_that_hangs_on_a_stopped_engine_goes_to_the_next_one(running):
    right = await running.find()
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        at = [Address(url=url, epoch=0, secret="s")]

        async def find() -> Address:
            return at[0]

        async with open_line(find) as moving, anyio.create_task_group() as tasks:
            answered = anyio.Event()

            async def ask() -> None:
                assert (await RemoteEngine(moving).state()).phase == "serving"
                answered.set()

            tasks.start_soon(ask)
            # It is connected, and waits: the other side accepts nothing and answers nothing.
            await anyio.to_thread.run_sync(stopped.accept)
            began_s = time.monotonic()
            at[0] = right
            with anyio.fail_after(10):
                await answered.wait()
        assert time.monotonic() - began_s < 5


async def test_an_engine_that_serves_something_else_is_refused_in_words(running, tmp_path):
    at = [await running.find()]

    async def find() -> Address:
        return at[0]

    data = DataFolder(root=tmp_path)
    data.create()
    with engine_in_thread(data, slots=3) as first:
        first.parts.lease.give_back()
    with engine_in_thread(data, slots=3) as other:
        async with open_line(find) as moving:
            assert (await moving.call("state")).phase == "serving"
            at[0] = await EngineAddress(other.parts.control.records).find()
            assert at[0].epoch == 2
            await moving.look()
            with pytest.raises(EngineAway, match="serves another definition"):
                await moving.call("state", patience_s=0.2)
