"""Random histories of saves, crashes, damage, pins, quarantines, leases, lives and collections, against a model of what must be.

Invariants: while a verified checkpoint of a series is there, one stays there (I6); what is pinned, quarantined, leased,
running or foreign stays; the newest verified is what readers get; and files do not pile up (I9).
"""

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from lilo_volume import (
    CheckpointMissing,
    LocalVolume,
    Retention,
    SoloGroup,
    begin,
    collect_garbage,
    is_pinned,
    latest,
    lease,
    pin,
    quarantine,
    release,
    remove,
    set_expiry,
    unpin,
)
from lilo_volume.manifest import attempt_folder, name_folder
from lilo_volume.testing.emulator import Emulator, Modes

COLLECTIONS = st.sampled_from(["one", "one", "one", "two"])
NAMES = st.sampled_from(["a", "b", "c"])
PICKS = st.integers(0, 5)
FILES = ("x", "y")
FILES_OF_ONE = len(FILES) + 2
"""With the manifest and the note."""
GUARD_S = 3600.0
LEASE_S = 1e9
STEPS_OF_A_SAVE = 14
POLICIES = st.builds(
    Retention,
    keep_last=st.sampled_from([1, 1, 2, 3, None]),
    keep_every=st.sampled_from([None, None, 2, 4]),
    reader_guard_s=st.just(0.0),
    attempt_guard_s=st.just(GUARD_S),
)


class Crash(BaseException):
    """The process ends here."""


def crash_after(number):
    seen = []

    def count(step):
        seen.append(step)
        if len(seen) > number:
            raise Crash

    return count


class History(RuleBasedStateMachine):
    """The model: which attempts are published and good, which are held, and what time it is."""

    leases = Bundle("leases")
    running = Bundle("running")

    def open(self, folder):
        return LocalVolume(folder / "volume")

    @initialize()
    def start(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.volume = self.open(self.folder)
        self.now = 1_790_000_000_000
        self.patch = mock.patch("time.time_ns", self.tick)
        self.patch.start()
        self.order = 0
        self.good = {}
        """Published and whole, by (collection, name): (order, checkpoint)."""
        self.pinned = set()
        self.barred = {}
        """Whole, but quarantined, as `good`."""
        self.leased = []
        self.lost = []
        """Of those: leases whose holder is gone, so that only time ends them."""
        self.alive = []
        self.expires = {}

    def tick(self):
        """The clock of the history, in nanoseconds; it never stands still."""
        self.now += 1
        return self.now * 1_000_000

    def teardown(self):
        if hasattr(self, "temporary"):
            self.patch.stop()
            self.temporary.cleanup()

    def begin(self, collection, name, on_step=None):
        self.order += 1
        return begin(
            self.volume,
            SoloGroup(),
            collection=collection,
            kind="weights",
            name=name,
            order=self.order,
            overwrite=True,
            durable=False,
            on_step=on_step,
        )

    def fill(self, attempt):
        for name in FILES:
            with attempt.create(name) as file:
                file.write(f"{attempt.publication.order} {name}".encode())

    def publish(self, attempt):
        checkpoint = attempt.publish(expected=FILES)
        where = checkpoint.publication
        self.good[where.collection, where.name] = checkpoint
        self.barred.pop((where.collection, where.name), None)

    def newest(self, collection):
        found = [c for (its, _), c in self.good.items() if its == collection]
        return max(found, key=lambda c: c.publication.order, default=None)

    @rule(collection=COLLECTIONS, name=NAMES)
    def save(self, collection, name):
        attempt = self.begin(collection, name)
        self.fill(attempt)
        self.publish(attempt)

    @rule(collection=COLLECTIONS, name=NAMES, number=st.integers(0, STEPS_OF_A_SAVE))
    def save_and_crash(self, collection, name, number):
        with contextlib.suppress(Crash):
            attempt = self.begin(collection, name, crash_after(number))
            self.fill(attempt)
            self.publish(attempt)
            return
        # A crash at the end may come after the publication: the volume is asked, and must say the old or the new.
        self.restart()
        before = self.good.get((collection, name))
        found = latest(self.volume, collection, "weights", verify="full").checkpoint
        if found is not None and found.publication.order == self.order:
            self.good[collection, name] = found
            self.barred.pop((collection, name), None)
        else:
            assert self.good.get((collection, name)) == before

    def restart(self):
        """The process that crashed is gone; a new one goes on."""

    @rule(target=running, collection=COLLECTIONS, name=NAMES)
    def begin_to_save(self, collection, name):
        attempt = self.begin(collection, name)
        self.fill(attempt)
        self.alive.append((self.now, attempt))
        return attempt

    @rule(attempt=consumes(running))
    def finish_saving(self, attempt):
        entries = [item for item in self.alive if item[1] is attempt]
        if not entries:
            return  # its process crashed
        (entry,) = entries
        self.alive.remove(entry)
        if self.now - entry[0] >= GUARD_S * 1000:
            return  # longer than any save takes: it may have been collected
        where = attempt.publication
        older = self.good.get((where.collection, where.name))
        self.publish(attempt)
        if older is not None and older.publication.order > where.order:
            # Of one name, what was published last counts, whatever its order.
            assert self.good[where.collection, where.name].publication.order == where.order

    @rule(collection=COLLECTIONS, name=NAMES, level=st.sampled_from(["cut", "flipped", "missing"]))
    def damage(self, collection, name, level):
        checkpoint = self.good.pop((collection, name), None)
        if checkpoint is None:
            return
        self.expires.pop(checkpoint.publication.attempt, None)
        self.spoil(checkpoint, level)

    def spoil(self, checkpoint, level):
        place = checkpoint.folder / "x"
        if level == "missing":
            place.unlink()
        else:
            place.write_bytes(place.read_bytes()[:-1] + (b"" if level == "cut" else b"!"))

    def picked(self, number):
        """Key and value of a good checkpoint; None, None if there is none."""
        keys = sorted(self.good)
        key = keys[number % len(keys)] if keys else None
        return key, self.good.get(key)

    @rule(number=PICKS)
    def pin(self, number):
        key, checkpoint = self.picked(number)
        if checkpoint is not None:
            pin(self.volume, key[0], "weights", key[1])
            self.pinned.add(key)

    @rule(collection=COLLECTIONS, name=NAMES)
    def unpin(self, collection, name):
        assert unpin(self.volume, collection, "weights", name) == (
            (collection, name) in self.pinned
        )
        self.pinned.discard((collection, name))

    @rule(number=PICKS)
    def quarantine(self, number):
        key, checkpoint = self.picked(number)
        if checkpoint is not None:
            assert quarantine(self.volume, key[0], "weights", key[1])
            self.barred[key] = self.good.pop(key)

    @rule(collection=COLLECTIONS, name=NAMES)
    def let_out(self, collection, name):
        checkpoint = self.barred.pop((collection, name), None)
        released = release(self.volume, collection, "weights", name)
        # The mark of what was overwritten may still be there.
        assert released or checkpoint is None
        if checkpoint is not None:
            self.good[collection, name] = checkpoint

    @rule(target=leases, number=PICKS)
    def lease(self, number):
        _, checkpoint = self.picked(number)
        if checkpoint is None:
            return None
        try:
            held = lease(self.volume, checkpoint, duration_s=LEASE_S)
        except CheckpointMissing:
            return None  # a collection that died had begun to remove it
        self.leased.append(held)
        return held

    @rule(held=consumes(leases))
    def release(self, held):
        if held is not None and held not in self.lost:
            held.release()
            self.leased.remove(held)

    @rule(collection=COLLECTIONS, name=NAMES)
    def remove(self, collection, name):
        checkpoint = self.good.pop((collection, name), None)
        if checkpoint is not None:
            remove(self.volume, checkpoint)

    @rule(number=PICKS, in_s=st.sampled_from([None, -1.0, 2 * GUARD_S]))
    def set_life(self, number, in_s):
        _, checkpoint = self.picked(number)
        if checkpoint is not None:
            ends = None if in_s is None else self.now + round(in_s * 1000)
            set_expiry(self.volume, checkpoint, ends)
            self.expires[checkpoint.publication.attempt] = ends

    @rule(hours=st.integers(1, 4))
    def wait(self, hours):
        self.now += hours * 3_600_000

    @rule(policy=POLICIES, dies_after=st.sampled_from([None, None, 0, 1, 2, 3, 4]))
    def collect(self, policy, dies_after):
        watch = None if dies_after is None else crash_after(dies_after)
        newest = {collection: self.expected_newest(collection) for collection in ("one", "two")}
        with contextlib.suppress(Crash):
            collect_garbage(self.volume, policy, level="full", now_unix_ms=self.now, on_step=watch)
        self.restart()
        for (collection, name), checkpoint in list(self.good.items()):
            if self.is_there(checkpoint):
                continue
            assert not self.is_held(checkpoint), "a leased checkpoint was removed"
            assert (collection, name) not in self.pinned, "a pinned checkpoint was removed"
            must_stay = newest[collection]
            assert must_stay is not checkpoint, "the newest verified was removed"
            del self.good[collection, name]
        self.forget_pins_about_nothing()
        for checkpoint in self.barred.values():
            assert self.is_there(checkpoint), "a quarantined checkpoint was removed"
        for since, attempt in self.alive:
            if self.now - since < GUARD_S * 1000:
                assert (attempt.folder / "x").exists(), "an attempt that runs was removed"

    def forget_pins_about_nothing(self):
        """A collection takes away the pins of a name under which nothing is left, unless it dies before."""
        for collection, name in sorted(self.pinned):
            home = name_folder(collection, "weights", name)
            # Of an attempt there are files in a folder; a pin lies beside them.
            left = any(
                e.path.count("/") > home.count("/") + 1 for e in self.volume.list_committed(home)
            )
            if not left and not is_pinned(self.volume, collection, "weights", name):
                self.pinned.discard((collection, name))

    def is_there(self, checkpoint):
        folder = attempt_folder(checkpoint.publication)
        paths = {entry.path for entry in self.volume.list_committed(folder)}
        return f"{folder}/manifest.json" in paths

    def is_held(self, checkpoint):
        attempt = checkpoint.publication.attempt
        return any(held.checkpoint.publication.attempt == attempt for held in self.leased)

    def expected_newest(self, collection):
        """The newest that no end of life takes; None if all end."""
        staying = [
            checkpoint
            for (its, name), checkpoint in self.good.items()
            if its == collection and not self.ends(its, name, checkpoint)
        ]
        return max(staying, key=lambda c: c.publication.order, default=None)

    def ends(self, collection, name, checkpoint):
        if (collection, name) in self.pinned:
            return False
        if self.is_held(checkpoint):
            return False
        ends = self.expires.get(checkpoint.publication.attempt)
        return ends is not None and ends <= self.now

    @rule()
    def readers_get_the_newest_good_one(self):
        for collection in ("one", "two"):
            found = latest(self.volume, collection, "weights", verify="full").checkpoint
            newest = self.newest(collection)
            if newest is None:
                continue  # what was overwritten and could not be removed may still be there
            assert found is not None
            assert found.publication.order >= newest.publication.order
            for name in FILES:
                expected = f"{found.publication.order} {name}".encode()
                assert (found.folder / name).read_bytes() == expected

    @precondition(lambda self: hasattr(self, "volume"))
    @rule()
    def nothing_piles_up(self):
        """After two collections a day apart, only what is kept, damaged or held is left."""
        self.now += 2 * 86_400_000
        policy = Retention(
            keep_last=1, reader_guard_s=0, attempt_guard_s=GUARD_S, remove_broken=True
        )
        newest = {collection: self.expected_newest(collection) for collection in ("one", "two")}
        for _ in range(2):
            collect_garbage(self.volume, policy, level="full", now_unix_ms=self.now)
            self.now += 86_400_000
        self.forget_pins_about_nothing()
        kept = {c.publication.attempt: key for key, c in self.good.items() if self.is_there(c)}
        for collection in ("one", "two"):
            assert newest[collection] is None or newest[collection].publication.attempt in kept
        self.good = {key: self.good[key] for key in kept.values()}
        barred = len(self.barred)
        most = len(kept) + len(self.leased) + len(self.pinned) + barred
        # What is leased may have been quarantined before it was overwritten.
        marks = 2 * len(self.leased) + len(self.pinned) + len(self.expires) + barred
        assert len(self.volume.list_committed("")) <= most * FILES_OF_ONE + marks

    @invariant()
    def a_series_with_a_good_checkpoint_keeps_one(self):
        for collection in ("one", "two"):
            if getattr(self, "good", None) and self.newest(collection) is not None:
                assert self.is_there(self.newest(collection))


class HistoryOfViews(History):
    """The same on a volume with a view per container; a crash loses what was not committed."""

    def open(self, folder):
        self.emulator = Emulator(folder / "emulator", modes=Modes(commit_atomic=False))
        self.container = self.emulator.mount()
        return self.emulator.volume(self.container)

    def restart(self):
        self.alive.clear()  # attempts of the container that is gone
        self.lost = list(self.leased)
        self.container.crash()
        self.container = self.emulator.mount()
        self.volume = self.emulator.volume(self.container)

    def spoil(self, checkpoint, level):
        path = f"{attempt_folder(checkpoint.publication)}/x"
        data = self.volume.read_committed(path)
        self.volume.remove_committed(path)
        if level != "missing":
            self.emulator.server.put(path, data[:-1] + (b"" if level == "cut" else b"!"))
        self.volume.reload()


SETTINGS = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHistory = pytest.mark.slow(pytest.mark.timeout(120)(History.TestCase))
TestHistory.settings = SETTINGS
TestHistoryOfViews = pytest.mark.slow(pytest.mark.timeout(120)(HistoryOfViews.TestCase))
TestHistoryOfViews.settings = SETTINGS
