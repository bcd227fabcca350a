"""Publishing: all of it or nothing, one definite outcome for everybody."""

import threading

import pytest
from lilo_volume import (
    CheckpointMissing,
    InvalidPath,
    ManifestInvalid,
    MissingFiles,
    NameTaken,
    PublishRefused,
    SoloGroup,
    UnexpectedFiles,
    begin,
    catalogue,
    open_named,
    survey,
)
from lilo_volume.digest import new_hasher


def start(volume, name="one", *, overwrite=False, order=0):
    return begin(
        volume,
        SoloGroup(),
        collection="run",
        kind="weights",
        name=name,
        order=order,
        overwrite=overwrite,
    )


def write(attempt, **files: bytes) -> None:
    for name, data in files.items():
        with attempt.create(name) as file:
            file.write(data)


def test_a_published_checkpoint_says_what_it_holds(volume):
    attempt = start(volume, order=7)
    with attempt.create("deep/shard") as file:
        file.write(b"ab")
        file.write(memoryview(b"cd"))
        assert file.tell() == 4
    published = attempt.publish(layout={"tp": 2}, metadata={"who": "me"})
    found = open_named(volume, "run", "weights", "one", verify="full")
    assert found == published
    (entry,) = found.manifest.files
    assert (entry.path, entry.size_bytes) == ("deep/shard", 4)
    hasher = new_hasher(entry.algorithm)
    assert hasher is not None
    hasher.update(b"abcd")
    assert entry.digest == hasher.hexdigest()
    assert found.manifest.metadata == {"who": "me"}
    assert found.manifest.layout == {"tp": 2}
    assert found.publication.order == 7
    assert (found.folder / "deep/shard").read_bytes() == b"abcd"


def test_a_taken_name_is_refused_before_anything_is_written(volume):
    attempt = start(volume)
    write(attempt, a=b"1")
    attempt.publish()
    before = volume.list_committed("")
    with pytest.raises(NameTaken):
        start(volume)
    assert volume.list_committed("") == before


def test_a_name_taken_while_writing_is_refused_and_leaves_nothing(volume):
    slow, quick = start(volume), start(volume)
    write(slow, a=b"slow")
    write(quick, a=b"quick")
    winner = quick.publish()
    with pytest.raises(NameTaken):
        slow.publish()
    assert not slow.folder.exists()
    assert open_named(volume, "run", "weights", "one", verify="full") == winner


def test_overwriting_replaces_and_removes_the_old(volume):
    first = start(volume)
    write(first, a=b"old", b=b"only in the old")
    old = first.publish()
    second = start(volume, overwrite=True)
    write(second, a=b"new")
    new = second.publish()
    assert open_named(volume, "run", "weights", "one", verify="full") == new
    assert not old.folder.exists()
    assert new.manifest.created_unix_ms > old.manifest.created_unix_ms
    assert [entry.path for entry in new.manifest.files] == ["a"]


def test_fewer_files_than_expected_are_refused_with_their_names(volume):
    attempt = start(volume)
    write(attempt, a=b"1")
    with pytest.raises(MissingFiles) as caught:
        attempt.publish(expected=["a", "b", "c"])
    assert caught.value.missing == ("b", "c")
    assert survey(volume).leftovers == ()


def test_a_file_from_somewhere_else_is_refused(volume):
    attempt = start(volume)
    write(attempt, a=b"1", b=b"2")
    with pytest.raises(UnexpectedFiles):
        attempt.publish(expected=["a"])


def test_a_checkpoint_without_files_is_refused(volume):
    with pytest.raises(PublishRefused):
        start(volume).publish()


def test_a_file_that_was_damaged_after_it_was_written_is_refused(volume):
    attempt = start(volume)
    write(attempt, a=b"123")
    (attempt.folder / "a").write_bytes(b"12")
    with pytest.raises(MissingFiles):
        attempt.publish()


def test_a_file_left_open_or_left_through_an_error_is_refused(volume):
    attempt = start(volume)
    file = attempt.create("a")
    file.write(b"1")
    with pytest.raises(PublishRefused):
        attempt.publish()
    file.close()
    attempt = start(volume)
    with pytest.raises(TypeError), attempt.create("a") as file:
        file.write("text")
    with pytest.raises(PublishRefused):
        attempt.publish()


@pytest.mark.parametrize(
    "name", ["../x", "/x", "manifest.json", "ATTEMPT.json", "manifest.json.tmp", ""]
)
def test_a_file_name_that_leaves_or_clashes_is_refused(volume, name):
    attempt = start(volume)
    with pytest.raises(InvalidPath):
        attempt.create(name)


def test_a_file_is_written_once(volume):
    attempt = start(volume)
    write(attempt, a=b"1")
    with pytest.raises(InvalidPath):
        attempt.create("a")


def test_leaving_an_attempt_through_an_error_removes_it(volume):
    attempt = start(volume)
    write(attempt, a=b"1")
    with pytest.raises(InvalidPath), attempt:
        attempt.create("a")
    assert not attempt.folder.exists()
    with pytest.raises(CheckpointMissing):
        open_named(volume, "run", "weights", "one")


def test_stray_files_are_neither_published_nor_in_the_way(volume):
    attempt = start(volume)
    write(attempt, a=b"1")
    (attempt.folder / "stray.distcp").write_bytes(b"of somebody else")
    attempt.publish(expected=["a"])
    found = open_named(volume, "run", "weights", "one", verify="full")
    assert [entry.path for entry in found.manifest.files] == ["a"]


@pytest.mark.parametrize("metadata", [{"step": 5}, {"step": {1}}], ids=str)
def test_metadata_that_no_reader_would_believe_is_refused(volume, metadata):
    attempt = start(volume)
    write(attempt, a=b"1")
    with pytest.raises((PublishRefused, ManifestInvalid)):
        attempt.publish(metadata=metadata)
    assert volume.list_committed("") == []


def test_an_unknown_digest_algorithm_is_refused_at_the_start(volume):
    with pytest.raises(InvalidPath):
        begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=0, algorithm="md5")


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_name_from_many_threads_has_one_definite_outcome_each(volume, overwrite):
    together = threading.Barrier(6)
    outcomes: dict[int, object] = {}

    def run(number: int) -> None:
        try:
            attempt = start(volume, overwrite=overwrite)
            write(attempt, a=b"%d" % number, b=b"%d" % number)
            together.wait(timeout=10)
            outcomes[number] = attempt.publish(metadata={"number": str(number)})
        except NameTaken as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcomes) == 6
    published = [n for n, outcome in outcomes.items() if not isinstance(outcome, NameTaken)]
    assert len(published) == (6 if overwrite else 1)
    found = open_named(volume, "run", "weights", "one", verify="full")
    number = int(found.manifest.metadata["number"])
    assert number in published
    assert {(found.folder / name).read_bytes() for name in "ab"} == {b"%d" % number}
    assert survey(volume).leftovers == ()


def test_different_names_at_once_are_all_published(volume):
    def run(number: int) -> None:
        attempt = start(volume, name=f"n{number}", order=number)
        write(attempt, a=b"%d" % number)
        attempt.publish()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [item.publication.name for item in catalogue(volume)] == [f"n{n}" for n in range(8)]


def test_a_retry_of_what_was_published_returns_it_and_leaves_nothing(volume):
    first = start(volume)
    write(first, a=b"1")
    published = first.publish(metadata={"who": "me"})
    again = begin(
        volume, SoloGroup(), collection="run", kind="weights", name="one", order=0, retry=True
    )
    write(again, a=b"1")
    assert again.publish(metadata={"who": "me"}) == published
    assert not again.folder.exists()
    assert survey(volume).leftovers == ()


@pytest.mark.parametrize(
    ("data", "metadata"), [(b"2", {}), (b"1", {"who": "somebody else"})], ids=["bytes", "metadata"]
)
def test_a_retry_with_other_content_is_refused(volume, data, metadata):
    first = start(volume)
    write(first, a=b"1")
    published = first.publish()
    again = begin(
        volume, SoloGroup(), collection="run", kind="weights", name="one", order=0, retry=True
    )
    write(again, a=data)
    with pytest.raises(NameTaken):
        again.publish(metadata=metadata)
    assert open_named(volume, "run", "weights", "one", verify="full") == published


def test_publishing_twice_is_publishing_once_and_an_attempt_that_failed_has_ended(volume):
    attempt = start(volume)
    write(attempt, a=b"1")
    assert attempt.publish() is attempt.publish()
    failed = start(volume, "two")
    for _ in range(2):
        with pytest.raises(PublishRefused):
            failed.publish()


def test_where_a_checkpoint_comes_from_and_what_was_expected_is_kept(volume):
    attempt = start(volume)
    write(attempt, b=b"2", a=b"1")
    attempt.publish(expected=["b", "a"], lineage={"parent": "run/weights/zero", "code": "abc"})
    manifest = open_named(volume, "run", "weights", "one", verify="full").manifest
    assert manifest.expected == ("a", "b")
    assert manifest.lineage == {"parent": "run/weights/zero", "code": "abc"}
