"""Faults of "the latest", and of what is deleted for it. Each test has the number of its public report."""

import threading

import pytest
from lilo_volume import (
    AsyncPublisher,
    CheckpointMissing,
    RankLost,
    Retention,
    collect_garbage,
    resume,
    survey,
)
from lilo_volume.faults import Fault, Faults

from tests.volume.cluster import SOON_S, WORLD, Cluster, one

KEEP_ONE = Retention(keep_last=1, reader_guard_s=0.0)
"""The default guard of attempts: a save of less than a day ago may still run."""


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


class Held:
    """A save in the background whose rank 0 waits before a step until it is let go."""

    def __init__(self, cluster, name, step="manifest"):
        self.reached, self.go = threading.Event(), threading.Event()

        def wait(taken):
            if taken == step:
                self.reached.set()
                assert self.go.wait(SOON_S)

        self.publisher = AsyncPublisher()
        self.pending = self.publisher.submit(
            lambda: cluster.run(
                lambda group: cluster.save(group, name, on_step=wait if group.rank == 0 else None)
            ),
            label=name,
        )
        assert self.reached.wait(SOON_S)

    def finish(self):
        self.go.set()
        outcomes = self.pending.result(SOON_S)
        self.publisher.close(SOON_S)
        return outcomes


@pytest.mark.parametrize("end", ["finish", "crash"])
def test_a8_the_latest_moves_only_once_the_manifest_is_committed(cluster, end):
    cluster.saved("10")
    held = Held(cluster, "20")
    assert cluster.newest() == "10"
    assert [c.publication.name for c in survey(cluster.reader()).checkpoints] == ["10"]
    collect_garbage(cluster.reader(), KEEP_ONE)
    assert cluster.newest() == "10"
    if end == "crash":
        cluster.restart()
        held.finish()
        assert cluster.newest() == "10"
    else:
        one(held.finish())
        assert cluster.newest() == "20"


def test_a9_the_only_complete_checkpoint_survives_while_the_next_one_is_saved(cluster):
    cluster.saved("500")
    held = Held(cluster, "1000")
    collect_garbage(cluster.reader(), KEEP_ONE)
    assert cluster.open("500")
    one(held.finish())
    collect_garbage(cluster.reader(), KEEP_ONE)
    assert cluster.newest() == "1000"
    with pytest.raises(CheckpointMissing):
        cluster.open("500")


@pytest.mark.parametrize("order", [("1000", "1500"), ("1500", "1000")], ids="-".join)
@pytest.mark.parametrize("crash_between", [False, True])
def test_a10_saves_that_overlap_never_cost_the_newest_complete_one(cluster, order, crash_between):
    cluster.saved("500")
    held = {name: Held(cluster, name) for name in ("1000", "1500")}
    done = [500]
    for number, name in enumerate(order):
        if number and crash_between:
            cluster.restart()
        outcomes = held[name].finish()
        if not (number and crash_between):
            one(outcomes)
            done.append(int(name))
        collect_garbage(cluster.reader(), KEEP_ONE)
        assert cluster.newest() == str(max(done))


def test_a11_shards_that_nobody_publishes_are_told_and_no_fresh_start(cluster):
    faults = Faults(Fault(step="check", action="stop"))
    outcomes = cluster.run(
        lambda group: cluster.save(group, on_step=faults if group.rank == 0 else None)
    )
    assert all(isinstance(outcome, RankLost) for outcome in outcomes[1:])
    (leftover,) = survey(cluster.reader()).leftovers
    assert leftover.state == "unpublished"
    with pytest.raises(CheckpointMissing) as caught:
        resume(cluster.reader(), "run", "weights")
    assert leftover.folder in str(caught.value)
    assert resume(cluster.reader(), "run", "weights", from_scratch=True) is None
    assert resume(cluster.reader(), "another run", "weights") is None


@pytest.mark.parametrize(("keep", "left"), [(3, [9000, 9500, 10000]), (1, [10000])])
def test_a21_steps_are_ordered_as_numbers_and_one_always_stays(cluster, keep, left):
    for step in (8500, 9000, 9500, 10000):
        cluster.saved(str(step))
    collect_garbage(cluster.reader(), Retention(keep_last=keep, reader_guard_s=0.0))
    orders = [c.publication.order for c in survey(cluster.reader()).checkpoints]
    assert orders == left
    assert cluster.newest() == "10000"


def test_a21_to_keep_nothing_is_refused():
    with pytest.raises(ValueError, match="keep_last"):
        Retention(keep_last=0)


def test_no_growth_after_many_saves_with_crashes(cluster):
    for number in range(1, 9):
        step = ("create *", "report", "commit", "check", "manifest", "announce")[number % 6]
        faults = {number % WORLD: Faults(Fault(step=step, action="stop"))}
        cluster.run(
            lambda group, n=number, f=faults: cluster.save(group, str(n), on_step=f.get(group.rank))
        )
        cluster.restart()
    cluster.saved("100")
    collect_garbage(
        cluster.reader(), Retention(keep_last=2, reader_guard_s=0.0, attempt_guard_s=0.0)
    )
    assert cluster.newest() == "100"
    assert len(cluster.committed()) <= 2 * (WORLD + 2)
