"""Contract: what every `Volume` must do, as functions that take a fresh, empty one and assert.

    @pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
    def test_my_volume(check, tmp_path):
        check(MyVolume(tmp_path))

They use the protocol alone and hold for media with private views as well as for plain directories.
"""

from __future__ import annotations

from collections.abc import Callable

from lilo_volume.attempt import begin
from lilo_volume.catalogue import catalogue, remove
from lilo_volume.errors import FileMissing, InvalidPath, LockTimeout, NameTaken
from lilo_volume.group import SoloGroup
from lilo_volume.restore import latest, open_named
from lilo_volume.volume import Volume

_BAD_PATHS = (
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a//b",
    "",
    ".",
    "a/.",
    "a\\b",
    "C:x",
    "a\nb",
    "a/",
)


def _raises(kind: type[Exception], action: Callable[[], object]) -> bool:
    try:
        action()
    except kind:
        return True
    return False


def _put(volume: Volume, path: str, data: bytes) -> None:
    place = volume.local_path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


def committed_bytes_are_listed_and_read(volume: Volume) -> None:
    """What was written and committed is in the committed state, with its size."""
    _put(volume, "a/b/one", b"123")
    _put(volume, "a/two", b"")
    volume.commit()
    assert {(e.path, e.size_bytes) for e in volume.list_committed("a")} == {
        ("a/b/one", 3),
        ("a/two", 0),
    }
    assert volume.read_committed("a/b/one") == b"123"


def listing_a_prefix_means_a_folder(volume: Volume) -> None:
    """`ab` is not below `a`; nothing there is an empty list; the empty prefix is everything."""
    _put(volume, "a/x", b"1")
    _put(volume, "ab/y", b"2")
    volume.commit()
    assert [entry.path for entry in volume.list_committed("a")] == ["a/x"]
    assert volume.list_committed("nothing/here") == []
    assert {entry.path for entry in volume.list_committed("")} == {"a/x", "ab/y"}


def missing_files_are_missing(volume: Volume) -> None:
    """Reading, copying and removing what is not there raises FileMissing."""
    assert _raises(FileMissing, lambda: volume.read_committed("no"))
    assert _raises(FileMissing, lambda: volume.remove_committed("no"))
    assert _raises(FileMissing, lambda: volume.remove_committed("no/such", recursive=True))
    assert _raises(FileMissing, lambda: volume.copy_committed(["no"], "to"))


def removal_is_of_the_committed_state(volume: Volume) -> None:
    """A removed file is gone, its neighbour is not; a folder goes whole."""
    for name in ("a/x", "a/y", "b/z"):
        _put(volume, name, b"1")
    volume.commit()
    volume.remove_committed("a/x")
    assert [entry.path for entry in volume.list_committed("")] == ["a/y", "b/z"]
    volume.remove_committed("a", recursive=True)
    assert [entry.path for entry in volume.list_committed("")] == ["b/z"]


def copies_are_by_value(volume: Volume) -> None:
    """A copy keeps its bytes when the source changes."""
    _put(volume, "a/x", b"old")
    _put(volume, "b/keep", b"")
    volume.commit()
    volume.copy_committed(["a/x"], "b")
    _put(volume, "a/x", b"new")
    volume.commit()
    assert volume.read_committed("b/x") == b"old"


def paths_cannot_leave_the_volume(volume: Volume) -> None:
    """Absolute paths, `..`, and the like are refused by every call."""
    for bad in _BAD_PATHS:
        assert _raises(InvalidPath, lambda bad=bad: volume.local_path(bad)), bad
        assert _raises(InvalidPath, lambda bad=bad: volume.read_committed(bad)), bad
        assert _raises(InvalidPath, lambda bad=bad: volume.remove_committed(bad, recursive=True)), (
            bad
        )
        assert not bad or _raises(InvalidPath, lambda bad=bad: volume.list_committed(bad)), bad


def the_lock_of_a_name_is_held_by_one(volume: Volume) -> None:
    """A second holder gets LockTimeout; after the first has left, the lock is free."""
    with volume.exclusive("a/name", timeout_s=1.0):
        assert _raises(LockTimeout, lambda: volume.exclusive("a/name", timeout_s=0.01).__enter__())
    with volume.exclusive("a/name", timeout_s=1.0):
        pass


def a_checkpoint_is_published_found_and_removed(volume: Volume) -> None:
    """The whole path through the library on this volume."""

    def publish(name: str, order: int, data: bytes, *, overwrite: bool = False) -> None:
        attempt = begin(
            volume,
            SoloGroup(),
            collection="c:1",
            kind="k",
            name=name,
            order=order,
            overwrite=overwrite,
        )
        with attempt.create("shards/0") as file:
            file.write(data)
        attempt.publish(expected=["shards/0"], metadata={"step": name})

    publish("One", 1, b"first")
    publish("one", 2, b"second")
    assert _raises(NameTaken, lambda: publish("one", 3, b"third"))
    publish("one", 3, b"third", overwrite=True)
    found = open_named(volume, "c:1", "k", "one", verify="full")
    assert (found.folder / "shards/0").read_bytes() == b"third"
    assert [item.publication.name for item in catalogue(volume)] == ["One", "one"]
    remove(volume, found)
    last = latest(volume, "c:1", "k", verify="full").checkpoint
    assert last is not None
    assert last.publication.name == "One"


VOLUME_CONTRACT: tuple[Callable[[Volume], None], ...] = (
    committed_bytes_are_listed_and_read,
    listing_a_prefix_means_a_folder,
    missing_files_are_missing,
    removal_is_of_the_committed_state,
    copies_are_by_value,
    paths_cannot_leave_the_volume,
    the_lock_of_a_name_is_held_by_one,
    a_checkpoint_is_published_found_and_removed,
)
"""Every check."""
