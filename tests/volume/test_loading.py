"""Loading on many nodes: views brought up to date once each, for a bounded time; what to go on from; what fits."""

import threading
import time

import pytest
from lilo_volume import (
    Checkpoint,
    CheckpointMissing,
    FileEntry,
    LocalVolume,
    Manifest,
    Publication,
    RankFailed,
    Receipt,
    VolumeBusy,
    VolumeUnavailable,
    begin,
    can_load,
    held_latest,
    latest,
    open_named,
    resume,
)
from lilo_volume.group import SoloGroup
from lilo_volume.marks import marks_of
from lilo_volume.testing import run_ranks
from lilo_volume.testing.emulator import Emulator

NODES = ("a", "a", "b", "b")
PLACE = ("run:train:0", "weights")


class Busy(LocalVolume):
    """A view in which a file is open for the first `times` reloads."""

    def __init__(self, root, times):
        super().__init__(root)
        self.times = times
        self.reloads = 0

    def reload(self):
        self.reloads += 1
        if self.reloads <= self.times:
            raise VolumeBusy("there are open files: path run/shard is open from 'loader'")


def test_a_busy_view_is_tried_again_until_it_is_free(volume, publish):
    publish("1", {"a": b"1"})
    view = Busy(volume.root, 2)
    assert latest(view, *PLACE, busy_timeout_s=10.0).checkpoint is not None
    assert view.reloads == 3


def test_a_view_that_stays_busy_is_an_error_in_time_that_names_the_open_path(volume, publish):
    publish("1", {"a": b"1"})
    start = time.monotonic()
    with pytest.raises(VolumeBusy, match="run/shard is open from 'loader'"):
        open_named(Busy(volume.root, 10**6), *PLACE, "1", busy_timeout_s=0.2)
    assert time.monotonic() - start < 5.0


def test_one_rank_of_each_node_reloads_and_a_busy_node_is_everybodys_error(volume, publish):
    publish("1", {"a": b"1"})
    views = {"a": Busy(volume.root, 0), "b": Busy(volume.root, 0)}

    def load(group):
        node = NODES[group.rank]
        return latest(
            views[node], *PLACE, group=group, node=node, timeout_s=5.0, busy_timeout_s=0.1
        )

    outcomes = run_ranks(4, load)
    assert [outcome.checkpoint.publication.name for outcome in outcomes] == ["1"] * 4
    assert [view.reloads for view in views.values()] == [1, 1]
    views["b"].times = 10**6
    assert [type(outcome) for outcome in run_ranks(4, load)] == [VolumeBusy] * 4


def test_a_rank_that_fails_otherwise_is_named_on_every_rank(volume, publish):
    class Broken(LocalVolume):
        def reload(self):
            raise OSError("stale handle")

    def load(group):
        node = NODES[group.rank]
        view = Broken(volume.root) if node == "b" else volume
        return latest(view, *PLACE, group=group, node=node, timeout_s=5.0)

    outcomes = run_ranks(4, load)
    assert all(isinstance(outcome, RankFailed) and outcome.rank == 2 for outcome in outcomes)


def test_a_fresh_place_starts_from_scratch_and_a_failed_run_does_not(volume):
    assert resume(volume, *PLACE) is None
    attempt = begin(volume, SoloGroup(), collection=PLACE[0], kind=PLACE[1], name="1", order=1)
    with attempt.create("shard") as file:
        file.write(b"x")
    with pytest.raises(CheckpointMissing):  # shards are there, and nobody published them
        resume(volume, *PLACE)
    assert resume(volume, *PLACE, from_scratch=True) is None
    assert resume(volume, "another", "weights") is None
    found = attempt.publish()
    assert resume(volume, *PLACE) == found


def test_an_old_checkpoint_that_is_replaced_while_it_is_verified_is_never_passed_over_for_an_older(
    volume, publish
):
    """The reader lists step 2; then step 3 replaces it. It must get 2 or 3, not 1."""
    publish("one", {"a": b"1"}, order=1)
    publish("best", {"a": b"2"}, order=2)

    class Racing(LocalVolume):
        listings = 0

        def list_committed(self, prefix):
            entries = super().list_committed(prefix)
            self.listings += 1
            if self.listings in self.when:
                publish("best", {"a": b"3"}, order=2 + self.listings, overwrite=True)
            return entries

    for when in ({1}, {2}, {3}, {1, 2}, {1, 3}, {1, 2, 3, 4, 5}):
        view = Racing(volume.root)
        view.when = when
        found = latest(view, *PLACE, verify="full")
        assert found.checkpoint.publication.name == "best", when
        view = Racing(volume.root)
        view.when = when
        assert open_named(view, *PLACE, "best", verify="full").publication.order > 2, when
        view = Racing(volume.root)
        view.when = when
        with held_latest(view, *PLACE, verify="full") as held:
            assert held.checkpoint.publication.name == "best", when
            assert (held.checkpoint.folder / "a").read_bytes() == b"3"


def test_a_place_that_never_settles_is_an_error_and_no_older_checkpoint(
    volume, publish, monkeypatch
):
    monkeypatch.setattr("lilo_volume.restore._LOOKS", 3)
    monkeypatch.setattr("lilo_volume.scan._LOOKS", 3)
    publish("one", {"a": b"1"}, order=1)
    publish("best", {"a": b"2"}, order=2)

    class Restless(LocalVolume):
        """Whatever was chosen is gone when it is looked at."""

        def read_committed(self, path):
            data = super().read_committed(path)
            if "/best/" in path:
                publish("best", {"a": b"3"}, order=2, overwrite=True)
            return data

    with pytest.raises(VolumeUnavailable):
        latest(Restless(volume.root), *PLACE, verify="full")


def test_ranks_hold_the_latest_together_until_all_have_left(volume, publish):
    publish("1", {"a": b"1"})
    slow = threading.Event()
    seen = []

    def load(group):
        with held_latest(volume, *PLACE, group=group, timeout_s=5.0) as found:
            if group.rank == 1:
                slow.wait(0.2)
                seen.extend(mark.kind for mark in marks_of(volume.list_committed("")))
            return found.checkpoint.publication.name

    assert run_ranks(2, load) == ["1", "1"]
    assert seen == ["lease"]
    assert marks_of(volume.list_committed("")) == []


def checkpoint(layout, world_size, **metadata):
    manifest = Manifest(
        publication=Publication(collection="c", kind="k", name="n", order=0, attempt="a"),
        world_size=world_size,
        layout=layout,
        files=(FileEntry(path="x", size_bytes=0, algorithm="sha256", digest=""),),
        receipts=tuple(
            Receipt(rank=rank, node="n", files=("x",) if rank == 0 else ())
            for rank in range(world_size)
        ),
        metadata=metadata,
        created_unix_ms=0,
    )
    return Checkpoint.of(LocalVolume("/tmp"), manifest)


@pytest.mark.parametrize(
    ("saved", "wanted", "verdict"),
    [
        ({"tp": 2, "dp": 4}, {"tp": 2, "dp": 4}, "same"),
        ({"tp": 2, "dp": 4, "pp": 1}, {"dp": 4, "tp": 2, "cp": 1}, "same"),
        ({"dp": 16}, {"dp": 8}, "reshardable"),
        ({"dp": 16}, {"tp": 2, "dp": 8}, "impossible"),
        ({}, {"dp": 8}, "impossible"),
    ],
)
def test_whether_a_layout_fits_is_said_before_a_device_is_taken(saved, wanted, verdict):
    fit = can_load(checkpoint(saved, 16), wanted, reshardable={"dp"})
    assert fit.verdict == verdict
    assert fit.possible == (verdict != "impossible")
    if verdict == "reshardable":
        assert "dp 16 -> 8" in fit.why


def test_any_axis_can_be_resharded_unless_the_reader_says_otherwise():
    assert can_load(checkpoint({"tp": 4}, 4), {"pp": 2}).verdict == "reshardable"
    assert can_load(checkpoint({}, 1), {}).verdict == "same"


def test_what_no_resharding_makes_up_for_is_impossible():
    saved = checkpoint({"dp": 1}, 1, base_model="tiny")
    assert can_load(saved, {"dp": 1}, same={"base_model": "tiny"}).verdict == "same"
    assert can_load(saved, {"dp": 1}, same={"base_model": "large"}).verdict == "impossible"
    assert can_load(saved, {"dp": 1}, same={"lora_rank": "8"}).verdict == "impossible"


def test_what_is_published_between_the_reload_and_the_choice_is_read_all_the_same(tmp_path):
    """A view per container: rank 0 lists what its view, and the other node's, do not have yet."""
    emulator = Emulator(tmp_path)
    writer = emulator.volume(emulator.mount("writer"))
    views = {node: emulator.volume(emulator.mount(node)) for node in "ab"}

    def save(order):
        with begin(
            writer,
            SoloGroup(),
            collection="run",
            kind="weights",
            name="best",
            order=order,
            overwrite=True,
        ) as attempt:
            with attempt.create("shard") as file:
                file.write(b"%d" % order)
            attempt.publish()

    save(1)
    barrier = threading.Barrier(2)

    def load(group):
        node = "ab"[group.rank]
        late = Late(views[node], lambda: save(2)) if group.rank == 0 else views[node]
        barrier.wait(5.0)
        found = latest(
            late, "run", "weights", verify="full", group=group, node=node, timeout_s=5.0
        ).checkpoint
        return found.publication.order, (found.folder / "shard").read_bytes()

    assert run_ranks(2, load) == [(2, b"2"), (2, b"2")]


class Late:
    """A volume on which something happens right before the first listing."""

    def __init__(self, volume, action):
        self._volume = volume
        self._action = action

    def __getattr__(self, name):
        return getattr(self._volume, name)

    def list_committed(self, prefix):
        if self._action is not None:
            action, self._action = self._action, None
            action()
        return self._volume.list_committed(prefix)
