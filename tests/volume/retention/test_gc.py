"""Garbage collection on a volume: what goes is gone whole, what must stay stays, whoever else is at work."""

import contextlib
import shutil

import pytest
from lilo_volume import (
    CheckpointMissing,
    LocalVolume,
    Retention,
    SoloGroup,
    begin,
    catalogue,
    collect_garbage,
    expiry,
    held_latest,
    is_pinned,
    latest,
    lease,
    open_named,
    pin,
    plan_garbage,
    remove,
    set_expiry,
    survey,
    unpin,
)
from lilo_volume.clock import unix_ms
from lilo_volume.marks import marks_in, marks_of

LAST_ONE = Retention(keep_last=1, reader_guard_s=0, attempt_guard_s=0)
EVERYTHING_ELSE = Retention(reader_guard_s=0, attempt_guard_s=0)
HOUR_MS = 3_600_000


def names(volume):
    return [item.publication.name for item in catalogue(volume)]


def files(volume):
    return [entry.path for entry in volume.list_committed("")]


class Crash(BaseException):
    """The process ends here."""


def crash_at(step):
    def stop(name):
        if name == step:
            raise Crash

    return stop


def abandoned(volume, name="dead", *, order=9, record=True):
    attempt = begin(
        volume, SoloGroup(), collection="run:train:0", kind="weights", name=name, order=order
    )
    with attempt.create("shard") as file:
        file.write(b"x")
    if not record:
        (attempt.folder / "attempt.json").write_bytes(b"")
    return attempt


def test_the_last_stay_and_the_rest_is_gone_whole(volume, publish):
    for step in (9000, 9500, 10000):
        publish(str(step), {"a": b"1", "b/c": b"2"}, order=step)
    done = collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["10000"]
    assert len(done.removed) == 2
    assert done.freed_bytes > 0
    assert len(files(volume)) == 4  # two files, the manifest, the note: no marks are left


def test_a_dry_run_tells_the_same_and_changes_nothing(volume, publish):
    for step in range(3):
        publish(str(step), {"a": b"1"}, order=step)
    before = files(volume)
    dry = collect_garbage(volume, LAST_ONE, dry_run=True)
    assert files(volume) == before
    wet = collect_garbage(volume, LAST_ONE)
    assert [d.candidate.folder for d in dry.removed] == [d.candidate.folder for d in wet.removed]
    assert [d.why for d in plan_garbage(volume, LAST_ONE)] == [
        "it is the newest verified checkpoint"
    ]


def test_series_are_kept_apart_and_one_alone_can_be_collected(volume, publish):
    for collection in ("one", "two"):
        for step in range(3):
            publish(str(step), {"a": b"1"}, order=step, collection=collection)
    collect_garbage(volume, LAST_ONE, collection="one", kind="weights")
    assert names(volume) == ["2", "0", "1", "2"]


def test_a_save_in_flight_neither_counts_nor_goes(volume, publish):
    publish("500", {"a": b"1"}, order=500)
    running = abandoned(volume, "1000", order=1000)
    collect_garbage(volume, Retention(keep_last=1, reader_guard_s=0))
    assert names(volume) == ["500"]
    running.publish()
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["1000"]


def test_abandoned_attempts_go_after_the_guard_and_foreign_folders_never(volume, publish):
    publish("good", {"a": b"1"})
    abandoned(volume)
    foreign = volume.root / "run=3atrain=3a0/weights/by-hand/x"
    foreign.mkdir(parents=True)
    (foreign / "model.bin").write_bytes(b"precious")
    (volume.root / "notes.txt").write_bytes(b"mine")
    policy = Retention(attempt_guard_s=3600)
    collect_garbage(volume, policy)
    assert [item.state for item in survey(volume).leftovers] == ["foreign", "unpublished"]
    collect_garbage(volume, policy, now_unix_ms=unix_ms() + 2 * HOUR_MS)
    assert [item.state for item in survey(volume).leftovers] == ["foreign"]
    assert (foreign / "model.bin").read_bytes() == b"precious"
    assert (volume.root / "notes.txt").exists()


def test_an_attempt_whose_note_was_cut_off_is_watched_then_removed(volume, publish):
    publish("good", {"a": b"1"})
    abandoned(volume, record=False)
    policy = Retention(attempt_guard_s=3600)
    assert collect_garbage(volume, policy).removed == ()
    now = unix_ms()
    assert collect_garbage(volume, policy, now_unix_ms=now + HOUR_MS // 2).removed == ()
    assert len(collect_garbage(volume, policy, now_unix_ms=now + 2 * HOUR_MS).removed) == 1
    assert len(files(volume)) == 3


def test_the_newest_that_is_good_stays_when_newer_ones_are_broken(volume, publish):
    publish("1", {"a": b"1"}, order=1)
    publish("2", {"a": b"1"}, order=2)
    broken = publish("3", {"a": b"1"}, order=3)
    (broken.folder / "a").write_bytes(b"2")  # same size: only its digest tells
    collect_garbage(volume, LAST_ONE, level="full")
    assert names(volume) == ["2", "3"]
    found = latest(volume, "run:train:0", "weights", verify="full").checkpoint
    assert found is not None
    assert found.publication.name == "2"


def test_an_overwritten_attempt_that_was_left_behind_is_removed(volume, publish):
    publish("one", {"a": b"1"})
    old = volume.root / "kept"
    shutil.copytree(volume.root / "run=3atrain=3a0", old)
    publish("one", {"a": b"2"}, overwrite=True)
    shutil.copytree(old, volume.root / "run=3atrain=3a0", dirs_exist_ok=True)
    shutil.rmtree(old)
    assert [item.state for item in survey(volume).leftovers] == ["replaced"]
    collect_garbage(volume, EVERYTHING_ELSE)
    assert survey(volume).leftovers == ()
    assert (open_named(volume, "run:train:0", "weights", "one").folder / "a").read_bytes() == b"2"


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(volume, publish):
    for step in range(3):
        publish(str(step), {"a": b"1"}, order=step)
    pin(volume, "run:train:0", "weights", "0", note="the one of the paper")
    pin(volume, "run:train:0", "weights", "0")
    assert is_pinned(volume, "run:train:0", "weights", "0")
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["0", "2"]
    assert unpin(volume, "run:train:0", "weights", "0")
    assert not unpin(volume, "run:train:0", "weights", "0")
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["2"]


def test_only_what_is_there_can_be_pinned(volume):
    with pytest.raises(CheckpointMissing):
        pin(volume, "run", "weights", "none")
    assert files(volume) == []


def test_a_leased_checkpoint_stays_until_the_lease_ends(volume, publish):
    first = publish("1", {"a": b"1"}, order=1)
    publish("2", {"a": b"1"}, order=2)
    with lease(volume, first, duration_s=60, note="a loader") as held:
        collect_garbage(volume, LAST_ONE)
        assert names(volume) == ["1", "2"]
        held.renew(3600)
        collect_garbage(volume, LAST_ONE, now_unix_ms=unix_ms() + HOUR_MS // 2)
        assert names(volume) == ["1", "2"]
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["2"]


def test_a_reader_that_died_holds_its_checkpoint_only_until_the_lease_ends(volume, publish):
    first = publish("1", {"a": b"1"}, order=1)
    publish("2", {"a": b"1"}, order=2)
    lease(volume, first, duration_s=60)
    collect_garbage(volume, LAST_ONE, now_unix_ms=unix_ms() + HOUR_MS)
    assert names(volume) == ["2"]
    assert marks_of(volume.list_committed("")) == []


@pytest.mark.parametrize("step", ["commit marks", "recheck", "unmark"])
def test_a_lease_taken_while_a_collection_runs_is_seen_by_one_side(volume, publish, step):
    first = publish("1", {"a": b"1"}, order=1)
    publish("2", {"a": b"1"}, order=2)
    leases = []

    def read(name):
        if name == step:
            with contextlib.suppress(CheckpointMissing):
                leases.append(lease(volume, first))

    done = collect_garbage(volume, LAST_ONE, on_step=read)
    assert bool(leases) != bool(done.removed)
    assert names(volume) == (["1", "2"] if leases else ["2"])


def test_a_lease_that_is_there_when_the_collection_looks_again_holds(volume, publish):
    """The reader looked for dooms before there was one: then collection must see its lease."""
    first = publish("1", {"a": b"1"}, order=1)
    publish("2", {"a": b"1"}, order=2)

    def collect(name):
        if name == "look for dooms" and not done:
            done.append(None)
            held = marks_of(volume.list_committed(""))
            assert [mark.kind for mark in held] == ["lease"]
            done[0] = collect_garbage(volume, LAST_ONE)

    done = []
    lease(volume, first, on_step=collect)
    assert done[0].removed == ()
    assert names(volume) == ["1", "2"]


def test_a_pin_set_while_a_collection_runs_is_respected(volume, publish):
    publish("1", {"a": b"1"}, order=1)
    publish("2", {"a": b"1"}, order=2)

    def pin_it(step):
        if step == "recheck":
            pin(volume, "run:train:0", "weights", "1")

    done = collect_garbage(volume, LAST_ONE, on_step=pin_it)
    assert [failure.why for failure in done.failures] == ["it was pinned meanwhile"]
    assert names(volume) == ["1", "2"]


def test_nothing_goes_when_the_newest_is_removed_by_hand_meanwhile(volume, publish):
    publish("1", {"a": b"1"}, order=1)
    newest = publish("2", {"a": b"1"}, order=2)

    def remove_newest(step):
        if step == "recheck":
            remove(volume, newest)

    collect_garbage(volume, LAST_ONE, on_step=remove_newest)
    assert names(volume) == ["1"]


def test_an_attempt_that_is_published_meanwhile_stays(volume, publish):
    publish("1", {"a": b"1"}, order=1)
    running = abandoned(volume, "2")

    def finish(step):
        if step == f"remove {running.folder.relative_to(volume.root)}":
            running.publish()

    done = collect_garbage(volume, LAST_ONE, on_step=finish)
    assert len(done.failures) == 1
    assert names(volume) == ["1", "2"]


def test_a_collection_that_dies_anywhere_is_finished_by_the_next(tmp_path, publish):
    steps = []
    for number in range(20):
        volume = LocalVolume(tmp_path / str(number))
        for step in range(3):
            publish(str(step), {"a": b"1"}, order=step, volume=volume)
        abandoned(volume)
        seen = []

        def watch(name, number=number, seen=seen):
            seen.append(name)
            if len(seen) == number:
                raise Crash

        with contextlib.suppress(Crash):
            collect_garbage(volume, LAST_ONE, on_step=watch)
        assert latest(volume, "run:train:0", "weights", verify="full").checkpoint is not None
        collect_garbage(volume, LAST_ONE)
        assert names(volume) == ["2"], number
        assert len(files(volume)) == 3, number
        steps = seen
    assert steps[:2] == ["commit marks", "recheck"]
    assert steps[-1] == "unmark"
    assert len(steps) == 6


def test_what_a_removal_left_half_done_is_finished_though_its_note_is_gone(volume, publish):
    publish("1", {"a": b"1", "b": b"2"}, order=1)
    publish("2", {"a": b"1"}, order=2)
    with contextlib.suppress(Crash):
        collect_garbage(volume, LAST_ONE, on_step=crash_at("recheck"))
    (doomed,) = [d.candidate for d in plan_garbage(volume, LAST_ONE) if d.candidate.doomed]
    for name in ("manifest.json", "attempt.json", "a"):
        (volume.root / doomed.folder / name).unlink()
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["2"]
    assert len(files(volume)) == 3


def test_the_end_of_a_life_is_set_changed_and_unset(volume, publish):
    checkpoint = publish("1", {"a": b"1"})
    assert expiry(volume, checkpoint) is None
    set_expiry(volume, checkpoint, 5)
    set_expiry(volume, checkpoint, 7)
    assert expiry(volume, checkpoint) == 7
    assert len(marks_of(volume.list_committed(""))) == 1
    set_expiry(volume, checkpoint, None)
    assert expiry(volume, checkpoint) is None
    collect_garbage(volume, EVERYTHING_ELSE)
    assert names(volume) == ["1"]
    set_expiry(volume, checkpoint, unix_ms() - 1)
    collect_garbage(volume, EVERYTHING_ELSE)
    assert files(volume) == []


def test_an_overwrite_does_not_inherit_the_end_of_a_life(volume, publish):
    set_expiry(volume, publish("1", {"a": b"1"}), 5)
    publish("1", {"a": b"2"}, overwrite=True)
    collect_garbage(volume, EVERYTHING_ELSE)
    assert names(volume) == ["1"]
    assert marks_of(volume.list_committed("")) == []


def test_the_latest_is_held_while_it_is_read(volume, publish):
    publish("1", {"a": b"1"}, order=1)
    with held_latest(volume, "run:train:0", "weights") as found:
        assert found.checkpoint is not None
        publish("2", {"a": b"1"}, order=2)
        collect_garbage(volume, LAST_ONE)
        assert (found.checkpoint.folder / "a").read_bytes() == b"1"
    assert marks_of(volume.list_committed("")) == []
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["2"]


def test_who_holds_the_latest_passes_over_what_is_being_removed(volume, publish):
    first = publish("1", {"a": b"1"}, order=1)
    doomed = publish("2", {"a": b"1"}, order=2)
    set_expiry(volume, doomed, 1)
    with contextlib.suppress(Crash):
        collect_garbage(volume, EVERYTHING_ELSE, on_step=crash_at("recheck"))
    with held_latest(volume, "run:train:0", "weights") as found:
        assert found.checkpoint == first
        assert [skip.label for skip in found.skipped] == ["run:train:0/weights/2"]


def test_a_removed_checkpoint_cannot_be_leased(volume, publish):
    gone = publish("1", {"a": b"1"})
    remove(volume, gone)
    with pytest.raises(CheckpointMissing):
        lease(volume, gone)
    assert files(volume) == []


def test_files_that_only_look_like_marks_are_none(volume, publish):
    checkpoint = publish("1", {"a": b"1"})
    home = checkpoint.folder.parent
    for name in (
        ".pin",
        ".pin-x-1-2-zz",
        ".lease-=zz-1-2-0123456789abcdef",
        "pin-a-1-2-0123456789abcdef",
    ):
        (home / name).write_bytes(b"")
    assert marks_in(volume, str(home.relative_to(volume.root))) == []
    collect_garbage(volume, LAST_ONE)
    assert names(volume) == ["1"]


def test_what_is_overwritten_while_a_reader_holds_it_goes_when_the_reader_is_done(volume, publish):
    old = publish("one", {"a": b"1"})
    with lease(volume, old):
        publish("one", {"a": b"2"}, overwrite=True)
        assert (old.folder / "a").read_bytes() == b"1"
        assert (
            open_named(volume, "run:train:0", "weights", "one").folder / "a"
        ).read_bytes() == b"2"
    collect_garbage(volume, EVERYTHING_ELSE)
    assert not old.folder.exists()
    assert len(files(volume)) == 3


def test_a_pin_ends_with_the_last_that_was_under_its_name(volume, publish):
    publish("1", {"a": b"1"}, order=1)
    gone = publish("2", {"a": b"1"}, order=2)
    pin(volume, "run:train:0", "weights", "2")
    remove(volume, gone)
    collect_garbage(volume, LAST_ONE)
    publish("2", {"a": b"1"}, order=2)
    assert not is_pinned(volume, "run:train:0", "weights", "2")
