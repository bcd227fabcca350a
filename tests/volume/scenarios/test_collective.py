"""Failures of some ranks while all of them save together. Each test has the number of its public report."""

import errno
import threading
from pathlib import Path

import pytest
from lilo_volume import (
    Checkpoint,
    LocalVolume,
    PublishRefused,
    RankFailed,
    RankLost,
    SoloGroup,
    VolumeError,
    VolumeUnavailable,
    begin,
    open_named,
)
from lilo_volume.faults import Fault, Faults
from lilo_volume.testing.sweep import PROTOCOLS, named_steps, old_checkpoint

from tests.volume.cluster import SOON_S, WORLD, Cluster


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def with_faults(cluster, faults_of_rank, name="20", **options):
    return cluster.run(
        lambda group: cluster.save(group, name, on_step=faults_of_rank.get(group.rank), **options)
    )


def test_a12_a_resumed_run_saves_the_same_step_again_and_nobody_waits(cluster):
    cluster.saved("10")
    with_faults(cluster, {r: Faults(Fault(step="check", action="stop")) for r in range(WORLD)})
    cluster.restart()
    cluster.saved(
        "20"
    )  # no name is taken, no leftover is in the way, and no wait ends by its limit
    assert cluster.newest() == "20"


def test_a13_a_folder_that_exists_before_it_can_be_seen_is_no_error(tmp_path, monkeypatch):
    volume = LocalVolume(tmp_path / "volume")
    real, told = Path.mkdir, set()

    def mkdir(path, *args, **kwargs):
        real(path, *args, **kwargs)
        if path not in told:
            told.add(path)
            raise FileExistsError(errno.EEXIST, "a peer was quicker", str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1) as attempt:
        with attempt.create("deep/shard") as file:
            file.write(b"1")
        attempt.publish()
    assert open_named(volume, "c", "k", "n", verify="full").size_bytes == 1


def test_a14_the_commit_of_one_node_fails_so_there_is_no_marker_and_the_old_one_stays(cluster):
    cluster.saved("20", text="old")
    faults = {2: Faults(Fault(step="commit", action="raise"))}
    outcomes = with_faults(cluster, faults, overwrite=True)
    for outcome in outcomes:
        assert isinstance(outcome, RankFailed)
        assert (outcome.rank, outcome.node) == (2, "n1")
    assert (cluster.open("20").folder / "__3_0.distcp").read_bytes() == b"3 old"


@pytest.mark.parametrize("dies", range(WORLD))
def test_a14_a_rank_dies_once_the_manifest_is_committed_so_it_is_complete_and_a_retry_is_no_op(
    cluster, dies
):
    # Rank 0 dies before it tells; or another one has died between its commit and hearing of the outcome.
    step = "announce" if dies == 0 else "report"
    faults = Faults(Fault(step=step, action="stop" if dies == 0 else "fail_after"))
    if dies:
        outcomes = cluster.run(lambda group: _dies_before_the_outcome(cluster, group, dies))
    else:
        outcomes = with_faults(cluster, {0: faults})
    live = [outcome for rank, outcome in enumerate(outcomes) if rank != dies]
    assert len({type(outcome) for outcome in live}) == 1
    assert isinstance(live[0], Checkpoint | RankLost)
    first = cluster.open("20")
    cluster.restart()
    assert cluster.saved("20", retry=True).manifest == first.manifest


def _dies_before_the_outcome(cluster, group, dies):
    """Take part up to the commit, and die."""
    with cluster.start(group, volume=_Deadly(cluster, group, dies)) as attempt:
        with attempt.create(f"__{group.rank}_0.distcp") as file:
            file.write(f"{group.rank} 20".encode())
        return attempt.publish(layout={"dp": WORLD}, metadata={"text": "20"})


class _Deadly:
    """A rank's volume; with it, the rank's group ends after the collective that follows its commit."""

    def __init__(self, cluster, group, dies):
        self._volume = cluster.volume(group.rank)
        if group.rank == dies:
            gather = group.all_gather

            def all_gather(value, *, timeout_s, step):
                if step == "outcome":
                    raise RankLost(step, (dies,), ("",), "this rank is gone")
                return gather(value, timeout_s=timeout_s, step=step)

            group.all_gather = all_gather

    def __getattr__(self, name):
        return getattr(self._volume, name)


def test_a15_storage_that_takes_longer_than_a_training_barrier_does_not_break_it(tmp_path):
    barrier_s = 0.1
    cluster = Cluster(tmp_path, latency_s=0.0)
    steps: list[str] = []

    def slow(step):
        steps.append(step)
        if step == "commit":
            threading.Event().wait(5 * barrier_s)

    outcomes = cluster.run(
        lambda group: cluster.save(group, on_step=slow if group.rank == 2 else None)
    )
    assert all(isinstance(outcome, Checkpoint) for outcome in outcomes)
    assert "commit" in steps  # progress is told
    assert cluster.newest() == "20"


def test_a15_storage_that_takes_longer_than_the_deadline_is_an_error_on_all_and_nothing_is_published(
    cluster,
):
    gate = threading.Event()

    def stuck(step):
        if step == "commit":
            gate.wait(SOON_S)

    threading.Timer(1.0, gate.set).start()
    outcomes = cluster.run(
        lambda group: cluster.save(group, on_step=stuck if group.rank == 2 else None, timeout_s=0.3)
    )
    for outcome in outcomes:
        assert isinstance(outcome, RankLost)
        assert outcome.step == "commit"
        assert (2, "n1") in zip(outcome.ranks, outcome.nodes, strict=True)
    assert cluster.newest() is None


def _all_steps():
    saving = PROTOCOLS["in place"]
    steps, _ = named_steps(saving, old_checkpoint(saving), same_name=False)
    return [(rank, step) for rank in range(WORLD) for step in steps[rank]]


@pytest.mark.parametrize(("rank", "step"), _all_steps(), ids=lambda v: str(v).replace("/", "."))
def test_a16_an_error_of_any_rank_at_any_step_takes_all_ranks_through_the_same_collectives(
    tmp_path, rank, step
):
    cluster = Cluster(tmp_path)
    step = step.replace("miles/", "")
    faults = Faults(Fault(step=step, action="raise", error=OSError))
    with_counts: list[list[str]] = [[] for _ in range(WORLD)]

    def save(group):
        gather = group.all_gather

        def counted(value, *, timeout_s, step):
            with_counts[group.rank].append(step)
            return gather(value, timeout_s=timeout_s, step=step)

        group.all_gather = counted
        return cluster.save(group, on_step=faults if group.rank == rank else None)

    outcomes = cluster.run(save)
    assert all(counts == with_counts[0] for counts in with_counts), with_counts
    published = [isinstance(outcome, Checkpoint) for outcome in outcomes]
    assert all(published) or not any(published)
    for outcome in outcomes:
        assert isinstance(outcome, Checkpoint | VolumeError | OSError)
    assert not any(isinstance(outcome, RankLost) for outcome in outcomes)


def test_a16_a_volume_out_of_order_on_two_ranks_is_told_by_all_and_waited_for_by_none(cluster):
    faults = {
        rank: Faults(Fault(step="create *", action="raise", error=VolumeUnavailable))
        for rank in (1, 3)
    }
    outcomes = with_faults(cluster, faults)
    # A rank that waited for these would say so, with the limit of its wait.
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, VolumeUnavailable if rank in (1, 3) else RankFailed)
    assert all(outcomes[rank].rank == 1 for rank in (0, 2))


def test_a25_two_ranks_that_claim_to_be_rank_0_are_refused_on_both(tmp_path):
    cluster = Cluster(tmp_path)

    class Claims:
        def __init__(self, group):
            self._group, self.rank, self.world_size = group, 0, group.world_size

        def __getattr__(self, name):
            return getattr(self._group, name)

    def save(group):
        claimed = Claims(group) if group.rank == 2 else group
        return begin(
            cluster.volume(group.rank),
            claimed,
            collection="run",
            kind="weights",
            name="20",
            order=20,
            timeout_s=SOON_S,
            node="n0" if group.rank < 2 else "n1",
        )

    outcomes = cluster.run(save)
    assert all(isinstance(outcome, PublishRefused) for outcome in outcomes)
    assert all(outcome.kind == "identity_refused" for outcome in outcomes)
    assert cluster.committed() == set()


def test_a25_two_nodes_of_one_identity_and_a_rank_without_a_volume_are_refused_with_the_table(
    tmp_path,
):
    for number, (node, volume) in enumerate([("n0", "its own"), ("n1", None)]):
        cluster = Cluster(tmp_path / str(number))

        def save(group, cluster=cluster, node=node, volume=volume):
            if group.rank < 2:
                return cluster.save(group)
            return cluster.save(group, node=node, **({} if volume else {"volume": None}))

        outcomes = cluster.run(save)
        assert {outcome.kind for outcome in outcomes} == {"identity_refused"}
        assert all(len(outcome.table.splitlines()) == WORLD + 1 for outcome in outcomes)
