"""Copying mode: a framework wrote into a folder of its own; every node's files are published all the same."""

import pytest
from lilo_volume import LocalVolume, MissingFiles, PublishRefused, begin, open_named, survey
from lilo_volume.testing import run_ranks
from lilo_volume.testing.emulator import Emulator

WORLD, NODES = 4, ("n0", "n0", "n1", "n1")


class Cluster:
    """Two nodes of two ranks, each node with its own view."""

    def __init__(self, folder):
        self.emulator = Emulator(folder)
        self.containers = {node: self.emulator.mount(node) for node in ("n0", "n1")}

    def volume(self, rank):
        return self.emulator.volume(self.containers[NODES[rank]])

    def reader(self):
        return self.emulator.volume(self.emulator.mount("reader"))

    def run(self, action):
        return run_ranks(WORLD, lambda group: action(group, self.volume(group.rank)))

    def start(self, group, volume, **options):
        return begin(
            volume,
            group,
            collection="run",
            kind="weights",
            name="one",
            order=1,
            timeout_s=5.0,
            node=NODES[group.rank],
            **options,
        )


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def write(volume, path, data):
    place = volume.local_path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


def shard(rank):
    return f"miles/__{rank}_0.distcp"


@pytest.mark.parametrize("named", [True, False], ids=["each rank names its files", "found"])
def test_files_of_all_nodes_are_published_from_a_folder_of_a_framework(cluster, named):
    def save(group, volume):
        attempt = cluster.start(group, volume)
        source = f"{attempt.folder.relative_to(volume.root)}/work/_tmp"
        write(volume, f"{source}/{shard(group.rank)}", b"%d" % group.rank)
        if group.rank == 2:
            write(volume, f"{source}/only/here/meta", b"m")
        files = [shard(group.rank), *(["only/here/meta"] if group.rank == 2 else [])]
        published = attempt.publish_from(source, files=files if named else None)
        assert attempt.publish_from(source) is published  # a second call does nothing
        return published

    outcomes = cluster.run(save)
    found = open_named(cluster.reader(), "run", "weights", "one", verify="full")
    assert [outcome.manifest for outcome in outcomes] == [found.manifest] * WORLD
    assert [entry.path for entry in found.manifest.files] == [
        *(shard(rank) for rank in range(WORLD)),
        "only/here/meta",
    ]
    assert (found.folder / shard(3)).read_bytes() == b"3"
    # Rank 0 reads its own node's files without a reload, and nothing of the source is left.
    assert (outcomes[0].folder / shard(1)).read_bytes() == b"1"
    assert len(cluster.emulator.server.list()) == 5 + 2
    calls = [container.calls["reload"] for container in cluster.containers.values()]
    assert calls == [0, 0]


@pytest.mark.parametrize("present", [0, 3])
def test_fewer_shards_than_ranks_are_refused_on_every_rank(cluster, present):
    def save(group, volume):
        attempt = cluster.start(group, volume)
        if group.rank < present:
            write(volume, f"_tmp/{shard(group.rank)}", b"1")
        write(volume, f"_tmp/notes-{group.rank}", b"not a shard")
        return attempt.publish_from("_tmp")

    outcomes = cluster.run(save)
    assert all(isinstance(outcome, PublishRefused) for outcome in outcomes)
    assert survey(cluster.reader()).checkpoints == ()


def test_a_shard_that_its_node_lost_is_refused_with_its_name(cluster):
    def save(group, volume):
        attempt = cluster.start(group, volume)
        write(volume, f"_tmp/{shard(group.rank)}", b"1")
        if group.rank == 3:
            write(volume, f"_tmp/more-{group.rank}.distcp", b"1")
        files = [shard(group.rank)]
        return attempt.publish_from(
            "_tmp", files=files, expected=[shard(rank) for rank in range(WORLD + 1)]
        )

    outcomes = cluster.run(save)
    assert all(isinstance(o, MissingFiles) and o.missing == (shard(4),) for o in outcomes)


def test_a_directory_that_all_nodes_share_works_as_well(tmp_path):
    volume = LocalVolume(tmp_path / "volume")

    def save(group):
        attempt = begin(
            volume,
            group,
            collection="run",
            kind="weights",
            name="one",
            order=1,
            timeout_s=5.0,
            node=NODES[group.rank],
        )
        write(volume, f"_tmp/{shard(group.rank)}", b"%d" % group.rank)
        return attempt.publish_from("_tmp")

    outcomes = run_ranks(WORLD, save)
    found = open_named(volume, "run", "weights", "one", verify="full")
    assert outcomes == [found] * WORLD
    assert not volume.local_path("_tmp").exists()
