"""FsspecVolume: the contract of every volume on memory and on S3, and what only a store without mounts can get wrong."""

import socket
import uuid

import pytest
from lilo_volume import (
    FileMissing,
    SoloGroup,
    VolumeUnavailable,
    begin,
    catalogue,
    latest,
    open_named,
)
from lilo_volume.testing import VOLUME_CONTRACT, run_ranks
from lilo_volume.volumes.fsspec import FsspecVolume

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3():
    """An S3 of our own on a free port: a function that opens a staging folder on a new bucket of it."""
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )

    def options():
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        }

    def make(staging, bucket=None):
        name = bucket or f"b{uuid.uuid4().hex}"
        if bucket is None:
            client.create_bucket(Bucket=name)
        return FsspecVolume(f"s3://{name}/prefix", staging, options=options()), name

    yield make
    client.close()
    moto.stop()


@pytest.fixture
def memory():
    """A new folder of the memory file system, as a url."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
def test_memory_keeps_the_contract_of_a_volume(check, memory, tmp_path):
    check(FsspecVolume(memory, tmp_path))


@pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
def test_s3_keeps_the_contract_of_a_volume(check, s3, tmp_path):
    check(s3(tmp_path)[0])


def save(volume, name="one", data=b"shard", **options):
    with begin(
        volume, SoloGroup(), collection="run", kind="weights", name=name, order=1, **options
    ) as attempt:
        with attempt.create("deep/0") as file:
            file.write(data)
        return attempt.publish()


def test_another_node_fetches_what_it_chose_and_nothing_else(s3, tmp_path):
    writer, bucket = s3(tmp_path / "a")
    save(writer, "one", b"1" * 3_000_000)
    save(writer, "two", b"2")
    reader, _ = s3(tmp_path / "b", bucket)
    found = open_named(reader, "run", "weights", "one", verify="full")
    assert (found.folder / "deep/0").read_bytes() == b"1" * 3_000_000
    assert not any("two" in path.name for path in (tmp_path / "b").rglob("*"))
    assert latest(reader, "run", "weights", verify="full").checkpoint is not None


def test_two_nodes_publish_one_checkpoint_of_both(s3, tmp_path):
    first, bucket = s3(tmp_path / "a")
    nodes = [first, s3(tmp_path / "b", bucket)[0]]

    def part(group):
        with begin(
            nodes[group.rank],
            group,
            collection="run",
            kind="weights",
            name="one",
            order=1,
            node=f"n{group.rank}",
            timeout_s=30,
        ) as attempt:
            with attempt.create(f"shard-{group.rank}") as file:
                file.write(b"%d" % group.rank)
            return attempt.publish(expected=["shard-0", "shard-1"])

    results = run_ranks(2, part)
    assert results[0].manifest == results[1].manifest
    reader, _ = s3(tmp_path / "c", bucket)
    found = open_named(reader, "run", "weights", "one", verify="full")
    assert [(found.folder / f"shard-{i}").read_bytes() for i in (0, 1)] == [b"0", b"1"]
    # No byte of a shard was sent twice, or by the wrong node.
    assert not (results[0].folder / "shard-1").exists()


def test_ranks_of_one_node_share_its_staging_folder(memory, tmp_path):
    volume = FsspecVolume(memory, tmp_path / "node")

    def part(group):
        with begin(
            volume, group, collection="run", kind="weights", name="one", order=1, timeout_s=30
        ) as attempt:
            with attempt.create(f"shard-{group.rank}") as file:
                file.write(b"%d" % group.rank)
            return attempt.publish(expected=["shard-0", "shard-1"])

    assert not [r for r in run_ranks(2, part) if isinstance(r, BaseException)]
    reader = FsspecVolume(memory, tmp_path / "reader")
    found = run_ranks(
        2,
        lambda group: open_named(
            reader, "run", "weights", "one", verify="full", group=group, timeout_s=30
        ),
    )
    assert (found[1].folder / "shard-0").read_bytes() == b"0"


def test_only_what_changed_is_sent(memory, tmp_path):
    volume = FsspecVolume(memory, tmp_path)
    (tmp_path / "old").write_bytes(b"1")
    volume.commit()
    sent = []
    store = volume._store
    send = store.send
    store.send = lambda place, path: (sent.append(path), send(place, path))
    (tmp_path / "new").write_bytes(b"2")
    volume.commit()
    volume.commit()
    assert sent == ["new"]
    # Another process of the node has the same view.
    FsspecVolume(memory, tmp_path).commit()
    assert sent == ["new"]


def test_what_another_node_removed_does_not_come_back_with_the_next_commit(memory, tmp_path):
    first, second = FsspecVolume(memory, tmp_path / "a"), FsspecVolume(memory, tmp_path / "b")
    save(first)
    second.remove_committed("run", recursive=True)
    first.commit()
    assert catalogue(first) == []
    save(first, "two")
    assert [item.publication.name for item in catalogue(second)] == ["two"]


def test_a_fetched_file_is_whole_or_not_there(memory, tmp_path):
    writer = FsspecVolume(memory, tmp_path / "a")
    save(writer)
    reader = FsspecVolume(memory, tmp_path / "b")
    (entry,) = [e for e in writer.list_committed("") if e.path.endswith("deep/0")]
    with pytest.raises(FileMissing):
        reader.fetch([entry.path, "no/such"])
    assert not any(path.is_file() and "fetching" in path.name for path in tmp_path.rglob("*"))
    reader.fetch([entry.path])
    reader.commit()  # what was fetched is not sent back
    assert reader.local_path(entry.path).read_bytes() == b"shard"


def test_a_store_that_fails_in_the_middle_of_a_file_leaves_nothing_of_it(memory, tmp_path):
    writer = FsspecVolume(memory, tmp_path / "a")
    save(writer)
    reader = FsspecVolume(memory, tmp_path / "b")
    (entry,) = [e for e in writer.list_committed("") if e.path.endswith("deep/0")]

    def blocks(path):
        yield b"sh"
        raise VolumeUnavailable("the line broke")

    reader._store.blocks = blocks
    with pytest.raises(VolumeUnavailable, match="the line broke"):
        reader.fetch([entry.path])
    files = [path.name for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert not any("fetching" in name for name in files), files


def test_a_store_that_does_not_answer_is_unavailable(tmp_path):
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    volume = FsspecVolume(
        "s3://bucket/prefix",
        tmp_path,
        options={
            "key": "k",
            "secret": "s",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
            "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
        },
    )
    with pytest.raises(VolumeUnavailable):
        volume.list_committed("")


def test_an_unknown_kind_of_url_is_said_at_once(tmp_path):
    with pytest.raises(VolumeUnavailable):
        FsspecVolume("nothing-of-the-kind://x", tmp_path)


def test_looking_puts_nothing_into_the_store(memory, tmp_path):
    volume = FsspecVolume(memory, tmp_path)
    assert catalogue(volume) == []
    assert latest(volume, "run", "weights").checkpoint is None
    assert volume._store._system.find(memory) == []
