"""Smaller public faults, each a test of its own; the name says which behaviour was reported."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from lilo_volume import (
    CheckpointCorrupt,
    LocalVolume,
    ManifestInvalid,
    MissingFiles,
    PublishRefused,
    SoloGroup,
    UnexpectedFiles,
    begin,
    can_load,
    latest,
    open_named,
)
from lilo_volume.manifest import parse

from tests.volume.cluster import ALL, NODES, WORLD, Cluster, one, shard


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_many_concurrent_saves_of_one_name_all_have_a_definite_outcome(tmp_path):
    volume, outcomes = LocalVolume(tmp_path), []

    def save(number):
        with begin(
            volume, SoloGroup(), collection="c", kind="k", name="id", order=1, overwrite=True
        ) as attempt:
            with attempt.create("state") as file:
                file.write(b"%d" % number)
            outcomes.append(attempt.publish(metadata={"number": str(number)}))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcomes) == 24
    found = open_named(volume, "c", "k", "id", verify="full")
    assert (found.folder / "state").read_text() == found.manifest.metadata["number"]


def test_a_distributed_save_is_atomic_to_a_reader_at_every_step(cluster):
    cluster.saved("10")
    seen = []

    def look(step):
        seen.append(cluster.newest())

    one(cluster.run(lambda group: cluster.save(group, on_step=look if group.rank == 0 else None)))
    assert set(seen) == {"10", "20"}
    assert seen == sorted(seen)


def test_a_staging_folder_outside_the_volume_is_refused_on_all_ranks(cluster, tmp_path):
    def save(group):
        with cluster.start(group) as attempt:
            return attempt.publish_from(str(tmp_path / "tmp"), files=[shard(group.rank)])

    outcomes = cluster.run(save)
    assert all(isinstance(outcome, PublishRefused) for outcome in outcomes)
    assert cluster.newest() is None


def test_another_world_size_is_told_as_resharding_and_not_as_a_missing_file(cluster):
    cluster.saved()
    fit = can_load(cluster.open("20"), {"dp": 2})
    assert (fit.verdict, fit.possible) == ("reshardable", True)
    assert "4 -> 2" in fit.why


def test_a_digest_that_is_missing_or_cannot_be_computed_is_no_pass(cluster):
    published = cluster.saved()
    path = f"run/weights/20/{published.publication.attempt}/manifest.json"
    data = cluster.server.read(path)
    digest = published.manifest.files[0].digest
    with pytest.raises(ManifestInvalid):
        parse(data.replace(digest.encode(), b""))
    unknown = replace(
        published.manifest,
        files=tuple(replace(entry, algorithm="md5") for entry in published.manifest.files),
    )
    cluster.server.put(path, unknown.to_bytes())
    with pytest.raises(CheckpointCorrupt):
        cluster.open("20")


def test_one_bad_node_does_not_fall_back_alone(cluster):
    cluster.saved("10")
    cluster.saved("20")
    cluster.restart()
    assert resumed_from(cluster) == {"20"}
    # A file of node 1 is damaged: all ranks fall back, though only one of them would have read it.
    bad = cluster.open("20").publication.attempt
    cluster.server.put(f"run/weights/20/{bad}/{shard(3)}", b"")
    assert resumed_from(cluster) == {"10"}


def resumed_from(cluster):
    """Names of what the ranks would load."""
    outcomes = cluster.run(
        lambda group: latest(
            cluster.volume(group.rank),
            "run",
            "weights",
            group=group,
            node=NODES[group.rank],
            timeout_s=5.0,
        )
    )
    return {outcome.checkpoint.publication.name for outcome in outcomes}


def test_only_what_all_ranks_wrote_counts(cluster):
    cluster.saved("10")
    outcomes = cluster.run(lambda group: cluster.save(group, "20", ranks=[0, 1, 2]))
    assert all(isinstance(o, MissingFiles) and o.missing == (shard(3),) for o in outcomes)
    assert cluster.newest() == "10"


def test_an_error_of_a_save_in_the_background_makes_the_process_fail(tmp_path):
    code = (
        "import sys; from lilo_volume import *\n"
        "def save():\n"
        "    with begin(LocalVolume(sys.argv[1]), SoloGroup(), collection='c', kind='k', name='n', order=1) as a:\n"
        "        raise OSError('no such bucket')\n"
        "AsyncPublisher().submit(save, label='n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "no such bucket" in done.stderr
    assert latest(LocalVolume(tmp_path), "c", "k").checkpoint is None


def test_two_ranks_that_write_one_name_are_refused_and_neither_wins(cluster):
    def save(group):
        with cluster.start(group) as attempt:
            with attempt.create("same" if group.rank in (1, 2) else shard(group.rank)) as file:
                file.write(b"%d" % group.rank)
            return attempt.publish()

    outcomes = cluster.run(save)
    assert all(isinstance(o, UnexpectedFiles) and o.unexpected == ("same",) for o in outcomes)
    assert cluster.newest() is None


def test_a_state_per_rank_that_only_rank_0_saved_is_refused_with_the_others_named(cluster):
    def save(group):
        with cluster.start(group) as attempt:
            if group.rank == 0:
                with attempt.create(shard(0)) as file:
                    file.write(b"0")
            return attempt.publish(expected=[shard(group.rank)])

    outcomes = cluster.run(save)
    for outcome in outcomes:
        assert isinstance(outcome, MissingFiles)
        assert outcome.missing == tuple(ALL[1:])
        assert outcome.sources == tuple(f"rank {r} on node {NODES[r]}" for r in range(1, WORLD))
