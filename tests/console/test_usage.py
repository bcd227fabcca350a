"""Usage by owner: nothing is lost, and nothing ends, while the records that know the owners are away."""

from __future__ import annotations

import anyio
import pytest
from lilo_engine.console.recorder import Recorder
from lilo_engine.console.usage_meter import UsageMeter, Used
from lilo_engine.control import usage
from lilo_engine.control.usage import keep_usage
from lilo_engine.errors import Unavailable
from lilo_engine.operations.operation import ModelId

pytestmark = pytest.mark.anyio


class Owners:
    """Looks owners up, while it can."""

    away = True

    async def owner(self, name: str) -> str:
        if self.away:
            raise Unavailable("the records are away")
        return f"owner of {name}"


class Log:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.used: dict[str, Used] = {}
        self.written = anyio.Event()

    async def add(self, used, now_s) -> None:
        if used:
            self.used.update(used)
            self.written.set()


@pytest.fixture
def metered():
    """A meter of two sampling sessions and one run, whose owners cannot be looked up yet."""
    owners, recorder = Owners(), Recorder(clock=iter([0.0, 2.0]).__next__)
    recorder.end(recorder.begin("gpu", "optim_step", (ModelId("run"),)))
    sampled = [{"a": Used(sampled_tokens=3)}, {"b": Used(sampled_tokens=4)}]
    meter = UsageMeter(
        recorder=recorder,
        samples=lambda: sampled.pop(0) if sampled else {},
        owner_of_run=owners.owner,
        owner_of_sampler=owners.owner,
        num_devices=2,
    )
    return meter, owners


async def test_what_was_used_while_owners_could_not_be_looked_up_is_counted_later(metered):
    meter, owners = metered
    for _ in range(2):
        with pytest.raises(Unavailable):
            await meter.take()
    owners.away = False
    assert await meter.take() == {
        "owner of run": Used(device_s=4.0),
        "owner of a": Used(sampled_tokens=3),
        "owner of b": Used(sampled_tokens=4),
    }
    assert await meter.take() == {}
    assert meter.totals["owner of run"] == Used(device_s=4.0)


async def test_usage_is_kept_by_a_server_whose_records_were_away_for_a_while(metered, monkeypatch):
    monkeypatch.setattr(usage, "INTERVAL_S", 0.01)
    meter, owners = metered
    tried = anyio.Event()

    async def owner(name: str) -> str:
        try:
            return await owners.owner(name)
        finally:
            tried.set()

    meter.owner_of_run = owner
    log = Log()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_usage, meter, log, lambda: 0.0)
            await tried.wait()
            owners.away = False
            await log.written.wait()
            tasks.cancel_scope.cancel()
    assert log.used["owner of run"] == Used(device_s=4.0)
