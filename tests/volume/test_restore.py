"""Restore and catalogue: what is believed, what is skipped and why, what is listed and removed."""

import os
import shutil

import pytest
from lilo_volume import (
    CheckpointCorrupt,
    CheckpointMissing,
    SoloGroup,
    begin,
    catalogue,
    latest,
    open_named,
    remove,
    remove_named,
    survey,
)

RUN = "run:train:0"


def delete(folder):
    (folder / "a").unlink()


def truncate(folder):
    os.truncate(folder / "a", 3)


def empty(folder):
    os.truncate(folder / "a", 0)


def flip(folder):
    data = bytearray((folder / "a").read_bytes())
    data[1] ^= 1
    (folder / "a").write_bytes(data)


def relink(folder):
    data = (folder / "a").read_bytes()
    (folder / "a").unlink()
    (folder / "elsewhere").write_bytes(data)
    os.symlink("elsewhere", folder / "a")


def spoil_manifest(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"weights", b"weighty"))


DAMAGES = [delete, truncate, empty, flip, relink, spoil_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_skipped_with_a_reason_and_never_opened_by_name(
    volume, publish, damage
):
    publish("good", {"a": b"good bytes"}, order=1)
    newest = publish("bad", {"a": b"some bytes", "b": b"more"}, order=2)
    damage(newest.folder)
    found = latest(volume, RUN, "weights", verify="full")
    assert found.checkpoint is not None
    assert found.checkpoint.publication.name == "good"
    assert [(skip.label, bool(skip.why)) for skip in found.skipped] == [
        (f"{RUN}/weights/bad", True)
    ]
    with pytest.raises(CheckpointCorrupt):
        open_named(volume, RUN, "weights", "bad", verify="full")


def test_each_level_sees_what_it_promises(volume, publish):
    for damage, caught_by in ((delete, "names"), (truncate, "size"), (flip, "full")):
        checkpoint = publish(damage.__name__, {"a": b"some bytes"})
        damage(checkpoint.folder)
        levels = ["names", "size", "full"]
        for level in levels[levels.index(caught_by) :]:
            with pytest.raises(CheckpointCorrupt):
                open_named(volume, RUN, "weights", damage.__name__, verify=level)
        for level in levels[: levels.index(caught_by)]:
            open_named(volume, RUN, "weights", damage.__name__, verify=level)


def test_order_decides_the_latest_by_number_not_by_text(volume, publish):
    for step in (9_000, 10_000, 9_500):
        publish(str(step), {"a": b"1"}, order=step)
    found = latest(volume, RUN, "weights").checkpoint
    assert found is not None
    assert found.publication.name == "10000"


def test_nothing_published_is_no_checkpoint_and_says_what_is_there(volume):
    assert latest(volume, RUN, "weights").checkpoint is None
    attempt = begin(volume, SoloGroup(), collection=RUN, kind="weights", name="n", order=1)
    with attempt.create("a") as file:
        file.write(b"1")
    found = latest(volume, RUN, "weights")
    assert found.checkpoint is None
    assert [skip.label for skip in found.skipped] == [f"{RUN}/weights/n"]
    with pytest.raises(CheckpointMissing):
        open_named(volume, RUN, "weights", "n")
    (leftover,) = survey(volume).leftovers
    assert (leftover.label, leftover.state) == (f"{RUN}/weights/n", "unpublished")


def test_a_copied_checkpoint_is_not_one_under_another_name(volume, publish):
    checkpoint = publish("real", {"a": b"1"})
    fake = checkpoint.folder.parent.parent / "fake" / checkpoint.folder.name
    shutil.copytree(checkpoint.folder, fake)
    with pytest.raises(CheckpointCorrupt):
        open_named(volume, RUN, "weights", "fake")
    assert [item.publication.name for item in catalogue(volume)] == ["real"]


def test_foreign_files_are_listed_as_foreign_and_never_as_checkpoints(volume, publish):
    publish("real", {"a": b"1"})
    for place in ("notes.txt", "x/y/z/w/file", "deep/er/than/four/levels/file"):
        (volume.root / place).parent.mkdir(parents=True, exist_ok=True)
        (volume.root / place).write_bytes(b"mine")
    found = survey(volume)
    assert [item.publication.name for item in found.checkpoints] == ["real"]
    assert {left.state for left in found.leftovers} == {"foreign"}


def test_the_catalogue_can_be_asked_for_one_collection_and_kind(volume, publish):
    publish("n", {"a": b"1"}, collection="A")
    publish("n", {"a": b"1"}, collection="a")
    assert [item.publication.collection for item in catalogue(volume)] == ["A", "a"]
    assert [item.publication.collection for item in catalogue(volume, collection="a")] == ["a"]
    assert catalogue(volume, collection="a", kind="other") == []


def test_removing_is_final_idempotent_and_of_that_checkpoint_alone(volume, publish):
    first, second = publish("1", {"a": b"1"}, order=1), publish("2", {"a": b"2"}, order=2)
    remove(volume, second)
    remove(volume, second)
    assert latest(volume, RUN, "weights").checkpoint == first
    assert not second.folder.exists()


def test_a_removed_checkpoint_of_a_replaced_attempt_leaves_its_successor(volume, publish):
    old = publish("1", {"a": b"1"})
    new = publish("1", {"a": b"2"}, overwrite=True)
    remove(volume, old)
    assert open_named(volume, RUN, "weights", "1") == new


def test_a_broken_checkpoint_can_be_removed_by_name_and_published_again(volume, publish):
    spoil_manifest(publish("1", {"a": b"1"}).folder)
    remove_named(volume, RUN, "weights", "1")
    with pytest.raises(CheckpointMissing):
        remove_named(volume, RUN, "weights", "1")
    publish("1", {"a": b"2"})
    open_named(volume, RUN, "weights", "1", verify="full")


def test_a_name_too_long_for_a_folder_is_published_and_listed_whole(volume, publish):
    name = "Ä" * 128
    publish(name, {"a": b"1"})
    assert open_named(volume, RUN, "weights", name, verify="full").publication.name == name
    assert [item.publication.name for item in catalogue(volume)] == [name]
