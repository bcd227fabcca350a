"""The lease on the records, over SQLite and PostgreSQL: one engine at a time, and none that lost it changes anything."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

import anyio
import anyio.to_thread
import pytest
import sqlalchemy as sa
from lilo_engine.control import lease as lease_module
from lilo_engine.control.lease import Lease, LeaseLost, read_lease
from lilo_engine.control.process_identity import process_identity
from lilo_engine.control.records import Records
from lilo_engine.control.tables import LeaseRow, SecretRow
from lilo_engine.errors import Unavailable

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request, tmp_path):
    """Opens the records of one database, as several processes would."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    records: list[Records] = []

    def open_again() -> Records:
        records.append(Records.at(tmp_path, url))
        return records[-1]

    open_again.url = url
    yield open_again
    for each in records:
        each.close()


@pytest.fixture
def other(opened):
    """Another process that took the lease and does not renew it."""
    process = subprocess.Popen(["sleep", "60"])
    records = opened()
    Lease.take(records, "first", address="http://first")
    identity = {"process": process_identity(process.pid)}
    records.now(lambda session: session.execute(sa.update(LeaseRow).values(identity)))
    yield process
    process.kill()
    process.wait()


def add_secret(records: Records, name: str) -> None:
    records.now(lambda session: session.add(SecretRow(name=name, value="x")))


def secrets(records: Records) -> set[str]:
    return records.now(lambda session: {row.name for row in session.query(SecretRow)})


def test_an_engine_that_gave_its_lease_back_is_followed_at_once(opened):
    first = Lease.take(opened(), "first")
    first.give_back()
    second = Lease.take(opened(), "second", expiry_s=1000)
    assert (first.epoch, second.epoch) == (1, 2)


def test_a_dead_engine_of_this_machine_is_followed_at_once(opened, other):
    other.kill()
    # Not waited for: it is a zombie now, and as dead as it will be.
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert Lease.take(opened(), "second", expiry_s=1000).epoch == 2


async def test_a_live_engine_is_named_to_the_second_one(opened, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.05)
    first = Lease.take(opened(), "first", address="http://first")
    refusal = r"first \(epoch 1, for fronts at http://first\), which is alive"
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.keep)
            with pytest.raises(Unavailable, match=refusal):
                await anyio.to_thread.run_sync(lambda: Lease.take(opened(), "second"))
            tasks.cancel_scope.cancel()


async def test_an_engine_that_was_stopped_and_wakes_changes_nothing(opened, other, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    other.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    second = Lease.take(opened(), "second", expiry_s=1.0)
    assert 1.0 <= time.monotonic() - began_s < 5
    assert second.epoch == 2
    stale = opened()
    first = Lease(records=stale, epoch=1, holder="first")
    stale.guard = first.guard
    with pytest.raises(LeaseLost, match=r"second took it \(epoch 2\)"):
        add_secret(stale, "of the first")
    add_secret(second.records, "of the second")
    assert secrets(second.records) == {"of the second"}
    with pytest.raises(LeaseLost):
        first.check()
    with anyio.fail_after(5):
        await first.keep()
    assert first.lost.is_set()
    # The new one is left alone by the old one's end.
    first.give_back()
    assert second.records.now(read_lease).held


async def test_a_lease_is_renewed_and_trusted_until_it_is_too_old(opened, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    lease = Lease.take(opened(), "engine")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease.keep)
            with pytest.raises(Unavailable, match="is alive"):
                await anyio.to_thread.run_sync(lambda: Lease.take(opened(), "second"))
            lease.check()
            tasks.cancel_scope.cancel()
    monkeypatch.setattr(lease_module, "TRUST_S", -1.0)
    with pytest.raises(Unavailable, match="did not renew"):
        lease.check()
    # The records still say whose they are.
    add_secret(lease.records, "allowed")


def test_two_contenders_at_once_are_one_engine(opened):
    records = [opened() for _ in range(4)]
    taken: list[int] = []
    start = threading.Barrier(4)

    def contend(each: Records) -> None:
        start.wait(10)
        with contextlib.suppress(Unavailable):
            taken.append(Lease.take(each, "one of four", expiry_s=0.5).epoch)

    threads = [threading.Thread(target=contend, args=(each,)) for each in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    # Whoever follows another one has waited for it, and the epochs differ.
    assert len(taken) == len(set(taken)) >= 1


def test_the_lease_is_not_taken_while_its_holder_is_in_a_transaction(opened):
    first, other_records = Lease.take(opened(), "first"), opened()
    taken = threading.Event()

    def take() -> None:
        change = sa.update(LeaseRow).values(epoch=2, holder="second")
        other_records.now(lambda session: session.execute(change))
        taken.set()

    contender = threading.Thread(target=take)

    def work(session) -> None:
        contender.start()
        assert not taken.wait(0.5)
        session.add(SecretRow(name="of the first", value="x"))

    first.records.now(work)
    contender.join(10)
    assert taken.is_set()
    assert secrets(other_records) == {"of the first"}
    with pytest.raises(LeaseLost):
        add_secret(first.records, "too late")
