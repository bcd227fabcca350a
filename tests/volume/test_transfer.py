"""Moving and checking files: a few threads, bounded memory, progress, the algorithm of the manifest."""

import os
import subprocess
import sys
import threading
import tracemalloc

import pytest
from lilo_volume import (
    CheckpointCorrupt,
    InvalidPath,
    PublishRefused,
    SoloGroup,
    begin,
    latest,
    open_named,
)
from lilo_volume.exchange import Target, pull, push
from lilo_volume.files import DigestingFile
from lilo_volume.flusher import Flusher
from lilo_volume.manifest import attempt_folder
from lilo_volume.transfer import check_files, each

MIB = 1024**2


def test_every_item_is_done_once_by_a_few_threads():
    done, threads = [], set()
    gate = threading.Barrier(3)

    def act(item):
        threads.add(threading.get_ident())
        if item < 3:
            gate.wait(5)  # three at once, or this times out
        done.append(item)

    each(range(20), act, workers=3)
    assert sorted(done) == list(range(20))
    assert len(threads) == 3


def test_the_first_error_is_raised_and_what_was_not_begun_is_left_out():
    done = []

    def act(item):
        done.append(item)
        if item == 2:
            raise KeyError(item)

    with pytest.raises(KeyError):
        each(range(100), act, workers=1)
    assert done == [0, 1, 2]
    each([], act, workers=4)


def test_progress_adds_up_to_everything(volume, publish, tmp_path):
    found = publish("one", {"a": b"1" * (3 * MIB), "b": b"", "c/d": b"2" * 10})
    told = []
    check_files(
        volume, attempt_folder(found.publication), found.manifest.files, tell=told.append, workers=2
    )
    last = told[-1]
    assert (last.done_bytes, last.done_files) == (last.total_bytes, last.total_files)
    assert (last.total_bytes, last.total_files) == (3 * MIB + 10, 3)
    assert [p.done_bytes for p in told] == sorted(p.done_bytes for p in told)
    told.clear()
    pull(volume, found, tmp_path / "out", tell=told.append)
    assert told[-1].done_bytes == 3 * MIB + 10


def test_every_fault_is_found_in_the_order_of_the_manifest(volume, publish):
    found = publish("one", {"a": b"1", "b": b"2", "c": b"3"})
    (found.folder / "c").write_bytes(b"x")
    (found.folder / "a").unlink()
    faults = check_files(volume, attempt_folder(found.publication), found.manifest.files, workers=3)
    assert [fault.split()[0] for fault in faults] == ["a", "c"]


def test_memory_does_not_grow_with_the_size_of_files(volume, tmp_path):
    # 96 MiB go through: written, verified, pulled, pushed.
    block = os.urandom(MIB)
    tracemalloc.start()
    try:
        with begin(
            volume, SoloGroup(), collection="c", kind="k", name="n", order=1, durable=False
        ) as attempt:
            for shard in range(3):
                with attempt.create(str(shard)) as file:
                    for _ in range(8):
                        file.write(block)
            attempt.publish()
        found = open_named(volume, "c", "k", "n", verify="full")
        pull(volume, found, tmp_path / "out", workers=3)
        push(volume, tmp_path / "out", Target(name="again"), workers=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB, f"{peak / MIB:.1f} MiB for three threads of 1 MiB each"


def test_a_pull_that_was_broken_off_goes_on_and_never_keeps_a_bad_file(volume, publish, tmp_path):
    found = publish("one", {"a": b"good", "b": b"12345"})
    (found.folder / "b").write_bytes(b"54321")
    out = tmp_path / "out"
    with pytest.raises(CheckpointCorrupt):
        pull(volume, found, out, workers=1)
    assert sorted(path.name for path in out.iterdir()) == ["a"]
    (found.folder / "b").write_bytes(b"12345")
    before = (out / "a").stat().st_ino
    pull(volume, found, out)
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "manifest.json"]
    assert (out / "a").stat().st_ino == before, "what was there and equal was copied again"
    other = publish("two", {"a": b"other"})
    with pytest.raises(InvalidPath):
        pull(volume, other, out)
    with pytest.raises(InvalidPath):
        pull(volume, found, out / "a")


def test_a_link_is_not_pushed(volume, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").symlink_to("/etc/passwd")
    with pytest.raises(InvalidPath):
        push(volume, folder, Target(collection="c", kind="k", name="n", order=1))
    assert latest(volume, "c", "k").checkpoint is None


def test_a_file_takes_pieces_of_any_size(tmp_path):
    from lilo_volume.digest import new_hasher

    hasher, check = new_hasher("sha256"), new_hasher("sha256")
    assert hasher is not None
    assert check is not None
    data, entries, flusher = os.urandom(5 * MIB), [], Flusher()
    with DigestingFile(
        tmp_path / "f", "f", "sha256", hasher, entries.append, flusher=flusher
    ) as file:
        start = 0
        for size in (1, 7, 0, MIB, MIB - 8, 3, 2 * MIB + 1, 5 * MIB):
            file.write(data[start : start + size])
            start += size
    assert flusher.wait() is None
    assert (tmp_path / "f").read_bytes() == data
    check.update(data)
    assert [(e.size_bytes, e.digest) for e in entries] == [(5 * MIB, check.hexdigest())]
    assert file.closed


def test_a_file_that_could_not_be_flushed_is_not_published(volume, monkeypatch):
    attempt = begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1)
    fsync = os.fsync

    def broken(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/a"):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    for name in ("a", "b"):
        with attempt.create(name) as file:
            file.write(b"1")
    with pytest.raises(PublishRefused):
        attempt.publish()
    assert latest(volume, "c", "k").checkpoint is None


WITHOUT_XXHASH = """
import sys
sys.modules["xxhash"] = None
from lilo_volume import *
volume = LocalVolume(sys.argv[1])
found = latest(volume, "run:train:0", "weights", verify="full")
print(found.checkpoint, [skip.why for skip in found.skipped])
with begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1) as attempt:
    with attempt.create("a") as file:
        file.write(b"1")
    print(attempt.publish().manifest.files[0].algorithm)
"""


def test_the_manifest_names_the_algorithm_and_what_cannot_be_computed_is_no_pass(volume, publish):
    found = publish("one", {"a": b"1"})
    assert found.manifest.files[0].algorithm == "xxh3_128"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_XXHASH, str(volume.root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, second = run.stdout.splitlines()
    assert first.startswith("None ")
    assert "unverifiable" in first
    assert second == "sha256"
    assert open_named(volume, "c", "k", "n", verify="full").size_bytes == 1


def test_room_that_a_long_file_was_given_and_did_not_need_is_given_back(volume):
    with begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1) as attempt:
        with attempt.create("long") as file:
            for _ in range(5):
                file.write(b"x" * MIB)
            file.write(b"tail")
        found = attempt.publish()
    place = found.folder / "long"
    assert place.stat().st_size == 5 * MIB + 4
    assert place.stat().st_blocks * 512 < 6 * MIB
    assert open_named(volume, "c", "k", "n", verify="full") == found
