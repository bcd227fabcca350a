"""Faults that come of each node having its own view. Each test has the number of its public report."""

import os
import subprocess
import sys
import threading

import pytest
from lilo_volume import (
    FileMissing,
    IdentityRefused,
    LocalVolume,
    MissingFiles,
    NameTaken,
    Retention,
    VolumeBusy,
    collect_garbage,
    latest,
    open_named,
    pull,
    survey,
)

from tests.volume.cluster import ALL, NODES, WORLD, Cluster, one, shard

NOW = Retention(attempt_guard_s=0.0, reader_guard_s=0.0)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_a1_the_same_path_is_a_different_place_on_each_node(cluster, tmp_path):
    places = {"n0": LocalVolume(tmp_path / "a"), "n1": LocalVolume(tmp_path / "b")}
    outcomes = cluster.run(lambda group: cluster.save(group, volume=places[NODES[group.rank]]))
    assert all(isinstance(outcome, IdentityRefused) for outcome in outcomes)
    assert latest(places["n0"], "run", "weights").checkpoint is None


def test_a1_a_view_that_never_reaches_the_publisher_is_refused_with_names_and_node(cluster):
    # The node answers, and its commits go nowhere.
    deaf = cluster.volume(2)
    deaf.commit = lambda: None
    outcomes = cluster.run(
        lambda group: cluster.save(
            group, volume=cluster.volume(group.rank) if group.rank < 2 else deaf
        )
    )
    for outcome in outcomes:
        assert isinstance(outcome, MissingFiles)
        assert outcome.missing == (shard(2), shard(3))
        assert outcome.sources == ("rank 2 on node n1", "rank 3 on node n1")
    assert cluster.newest() is None


def test_a2_another_node_loads_everything_with_the_writers_gone(cluster):
    cluster.saved()
    for container in cluster.containers.values():
        container.crash()
    found = cluster.open("20")
    assert [(found.folder / name).read_bytes() for name in ALL] == [
        f"{rank} 20".encode() for rank in range(WORLD)
    ]


def test_a3_all_ranks_publish_at_once_and_twice_and_nothing_temporary_is_left(cluster):
    first = cluster.saved()
    again = cluster.saved(retry=True)
    assert again.manifest == first.manifest
    collect_garbage(cluster.reader(), NOW)
    assert cluster.committed() == {
        f"run/weights/20/{first.publication.attempt}/{name}"
        for name in [*ALL, "manifest.json", "attempt.json"]
    }


@pytest.mark.parametrize("slow", range(WORLD))
def test_a4_leaders_of_all_nodes_start_at_once_and_one_owner_does_what_destroys(tmp_path, slow):
    # On a directory that all nodes share; one rank is held back before each of its steps.
    volume, cluster = LocalVolume(tmp_path / "shared"), Cluster(tmp_path / "unused")
    removed = []
    spy = Removals(volume, removed)

    def save(group):
        turn = threading.Event()

        def wait(step):
            turn.wait(0.01 if group.rank == slow else 0.0)

        view = spy if group.rank == 0 else Removals(volume, removed_elsewhere)
        return cluster.save(group, volume=view, overwrite=True, on_step=wait)

    removed_elsewhere: list[str] = []
    for _ in range(2):
        published = one(cluster.run(save))
    assert removed_elsewhere == []
    assert open_named(volume, "run", "weights", "20", verify="full") == published
    assert survey(volume).leftovers == ()


class Removals(LocalVolume):
    """A directory that notes what is removed through it."""

    def __init__(self, volume, removed):
        super().__init__(volume.root)
        self.removed = removed

    def remove_committed(self, path, *, recursive=False):
        self.removed.append(path)
        super().remove_committed(path, recursive=recursive)


def test_a17_a_partial_directory_that_exists_here_already_is_never_taken(cluster, tmp_path):
    published = cluster.saved()
    # Rank 0's view has two of four shards; the committed state is what counts.
    assert sorted(os.listdir(published.folder)) == [
        shard(0),
        shard(1),
        "attempt.json",
        "manifest.json",
    ]
    volume = cluster.volume(0)
    with pytest.raises(FileMissing):
        pull(volume, published, tmp_path / "part")
    assert not (tmp_path / "part" / "manifest.json").exists()
    # Who opens it first has all of it.
    found = open_named(volume, "run", "weights", "20", verify="full")
    pull(volume, found, tmp_path / "here")
    assert {shard(rank) for rank in range(WORLD)} <= set(os.listdir(tmp_path / "here"))
    assert (tmp_path / "here" / shard(3)).read_bytes() == b"3 20"


def test_a18_who_enters_late_reads_what_is_committed_and_cannot_move_anything_back(cluster):
    cluster.saved("10")
    late = cluster.reader()  # mounted now, and warm
    cluster.saved("20")
    assert latest(late, "run", "weights", verify="full").checkpoint.publication.name == "20"
    outcomes = cluster.run(lambda group: cluster.save(group, "10", text="rewound"))
    assert all(isinstance(outcome, NameTaken) for outcome in outcomes)
    assert cluster.newest() == "20"


def test_a18_what_to_resume_is_decided_once_and_every_node_reloads_before_it_reads(cluster):
    cluster.saved("10")
    cluster.restart()
    for node in cluster.containers.values():
        node.calls.clear()

    def resume(group):
        volume = cluster.volume(group.rank)
        found = latest(
            volume,
            "run",
            "weights",
            verify="full",
            group=group,
            node=NODES[group.rank],
            timeout_s=5.0,
        )
        assert found.checkpoint is not None
        return [(found.checkpoint.folder / name).read_bytes() for name in ALL]

    outcomes = cluster.run(resume)
    assert outcomes == [outcomes[0]] * WORLD
    assert [node.calls["reload"] for node in cluster.containers.values()] == [1, 1]


@pytest.mark.parametrize("commit_reload", ["off", "on"])
def test_a19_a_save_succeeds_with_files_open_and_a_process_inside_and_never_reloads(
    tmp_path, commit_reload
):
    cluster = Cluster(tmp_path, commit_reload=commit_reload)
    cluster.saved("10")
    held = next(cluster.containers["n0"].root.rglob(shard(0)))
    with held.open("rb"):
        cluster.saved("20")
        assert cluster.newest() == "20"
        assert [node.calls["reload"] for node in cluster.containers.values()] == [0, 0]
        # A load says which file it is, and gives up after a bounded time.
        with pytest.raises(VolumeBusy) as caught:
            latest(cluster.volume(0), "run", "weights", busy_timeout_s=0.1)
        assert held.name in str(caught.value)
        assert str(os.getpid()) in str(caught.value)


def test_a19_a_load_waits_until_another_process_has_left(tmp_path):
    from lilo_volume.testing.emulator import Emulator

    emulator = Emulator(tmp_path, shared=True)
    container = emulator.mount()
    holder = subprocess.Popen(
        [sys.executable, "-c", "print('in', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=container.root,
    )
    with holder:
        assert holder.stdout.readline() == b"in\n"
        timer = threading.Timer(0.2, lambda: holder.stdin.write(b"\n") and holder.stdin.flush())
        timer.start()
        assert latest(emulator.volume(container), "run", "weights").checkpoint is None
        timer.join()


def test_a27_files_that_take_long_to_show_are_waited_for_and_one_rank_decides(tmp_path):
    cluster = Cluster(tmp_path)
    # What one node commits shows to the other only after a while, different for each.
    for node, lag_s in (("n0", 0.4), ("n1", 0.2)):
        cluster.containers[node] = cluster.emulator.mount(node, lag_s=lag_s)
    one(cluster.run(lambda group: cluster.save(group, settle_s=5.0)))
    assert cluster.newest() == "20"


def test_a27_a_wait_for_files_that_never_show_is_bounded(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.containers["n0"] = cluster.emulator.mount("n0", lag_s=60.0)
    outcomes = cluster.run(lambda group: cluster.save(group, settle_s=0.2))
    assert all(isinstance(o, MissingFiles) and o.missing == (shard(2), shard(3)) for o in outcomes)
