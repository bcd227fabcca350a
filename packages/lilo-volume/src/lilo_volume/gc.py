"""Garbage collection: remove what retention lets go, and what attempts and removals left behind.

    plan        list once, decide (retention.py)
    doom        mark what is to be removed, in one commit
    recheck     list again: who has been leased or pinned meanwhile is let off, and so is everybody in a series whose
                newest verified checkpoint is not there any more
    remove      server-side, manifest first
    unmark      marks that have done their work

It may die anywhere: dooms tell the next one what was begun. It runs beside publishers, readers and others of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lilo_volume.candidates import attempt_of, candidates_of, folder_of, home_of, names_in
from lilo_volume.catalogue import LOCK_TIMEOUT_S
from lilo_volume.clock import unix_ms
from lilo_volume.errors import InvalidPath, NameTaken, VolumeError
from lilo_volume.files import remove_tree
from lilo_volume.log import warn
from lilo_volume.manifest import MANIFEST_NAME
from lilo_volume.marks import Mark, marks_of, new_mark, put_marks, remove_marks
from lilo_volume.naming import encode
from lilo_volume.retention import Decision, Retention, decide
from lilo_volume.scan import remove_attempt
from lilo_volume.steps import OnStep, Steps
from lilo_volume.verify import Verify
from lilo_volume.volume import Entry, Volume

_DOOM_RESTS_MS = 3_600_000
"""A doom of what stays is withdrawn after this long: until then, another collection may be at work on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What should have been removed and was not."""

    decision: Decision
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did, or would have done."""

    decisions: tuple[Decision, ...]
    """About every folder, sorted by folder."""
    removed: tuple[Decision, ...]
    """Of a dry run: what would be."""
    failures: tuple[Failure, ...]
    stale_marks: int
    """Marks that were removed because they had ended, or were about nothing any more."""
    dry_run: bool

    @property
    def freed_bytes(self) -> int:
        """Sum of what was removed."""
        return sum(decision.candidate.size_bytes for decision in self.removed)


def plan_garbage(
    volume: Volume,
    retention: Retention,
    *,
    collection: str | None = None,
    kind: str | None = None,
    level: Verify = "size",
    now_unix_ms: int | None = None,
) -> list[Decision]:
    """What would happen to each attempt's folder now; changes nothing.

    Args:
        volume: the medium.
        retention: the policy.
        collection: look at this one only.
        kind: look at this one of the collection only.
        level: what a checkpoint must pass to count as verified.
        now_unix_ms: the time to decide by; the clock's if it is not given.
    """
    now = unix_ms() if now_unix_ms is None else now_unix_ms
    return _Collection(volume, retention, _prefix(collection, kind), level, now).decisions


def collect_garbage(
    volume: Volume,
    retention: Retention,
    *,
    collection: str | None = None,
    kind: str | None = None,
    level: Verify = "size",
    dry_run: bool = False,
    now_unix_ms: int | None = None,
    on_step: OnStep | None = None,
) -> Collected:
    """Remove what retention lets go. Not in the critical path of a save: run it after, or beside.

    Args:
        volume: the medium.
        retention: the policy.
        collection: look at this one only.
        kind: look at this one of the collection only.
        level: what a checkpoint must pass to count as verified.
        dry_run: change nothing, only tell.
        now_unix_ms: the time to decide by; the clock's if it is not given.
        on_step: told the name of each step.

    Raises:
        VolumeError: the volume cannot be listed, or takes no marks. What cannot be removed is told in the result.
    """
    now = unix_ms() if now_unix_ms is None else now_unix_ms
    run = _Collection(volume, retention, _prefix(collection, kind), level, now)
    if dry_run:
        removed = tuple(d for d in run.decisions if d.verdict == "remove")
        return run.outcome(removed, (), len(run.stale()), dry_run=True)
    return run.act(Steps(on_step))


class _Collection:
    """One run over one part of a volume."""

    def __init__(
        self, volume: Volume, retention: Retention, prefix: str, level: Verify, now_unix_ms: int
    ) -> None:
        self._volume = volume
        self._prefix = prefix
        self._now = now_unix_ms
        self._names = names_in(volume, prefix)
        candidates = [c for name in self._names for c in candidates_of(volume, name, level)]
        self.decisions = decide(candidates, retention, now_unix_ms=now_unix_ms)

    def act(self, steps: Steps) -> Collected:
        """Doom, recheck, remove, unmark."""
        wanted = [d for d in self.decisions if d.verdict == "remove"]
        watched = [d for d in self.decisions if d.verdict == "watch" and not d.candidate.doomed]
        dooms = [self._doom(d) for d in (*wanted, *watched) if not d.candidate.doomed]
        if dooms:
            put_marks(self._volume, dooms, "garbage collection", steps)
        entries = steps.retried("recheck", lambda: self._volume.list_committed(self._prefix))
        marks = marks_of(entries)
        let_off = self._let_off(wanted, entries, marks)
        going = [d for d in wanted if d.candidate.folder not in let_off]
        removed, failures = self._remove(going, steps)
        gone = {d.candidate.folder for d in removed}
        stale = [m for m in marks if folder_of(m) in gone]
        stale += [m for m in marks if m.kind == "doom" and folder_of(m) in let_off]
        stale += [m for m in self.stale() if m not in stale]
        steps.retried("unmark", lambda: remove_marks(self._volume, stale))
        spared = [d for d in wanted if d.candidate.folder in let_off]
        failures += [Failure(decision=d, why=let_off[d.candidate.folder]) for d in spared]
        return self.outcome(removed, failures, len(stale), dry_run=False)

    def outcome(
        self,
        removed: Sequence[Decision],
        failures: Sequence[Failure],
        num_stale: int,
        *,
        dry_run: bool,
    ) -> Collected:
        """The report."""
        return Collected(
            decisions=tuple(sorted(self.decisions, key=lambda d: d.candidate.folder)),
            removed=tuple(removed),
            failures=tuple(failures),
            stale_marks=num_stale,
            dry_run=dry_run,
        )

    def stale(self) -> list[Mark]:
        """Marks that have ended, or are about attempts that are gone; dooms of what stays are withdrawn."""
        going = {d.candidate.folder for d in self.decisions if d.verdict != "keep"}
        stale: list[Mark] = []
        for name in self._names:
            there = {found.folder for found in name.found}
            for mark in name.marks:
                # A pin is about the name: it has ended when nothing at all is left under it.
                gone = folder_of(mark) not in there if mark.attempt else not there
                ended = mark.kind == "lease" and not mark.runs(self._now)
                rested = self._now - mark.created_unix_ms > _DOOM_RESTS_MS
                idle = mark.kind == "doom" and folder_of(mark) not in going and rested
                if gone or ended or idle:
                    stale.append(mark)
        return stale

    def _doom(self, decision: Decision) -> Mark:
        folder = decision.candidate.folder
        home = home_of(folder)
        return new_mark("doom", home, attempt_of(folder), now_unix_ms=self._now)

    def _let_off(
        self, wanted: list[Decision], entries: list[Entry], marks: list[Mark]
    ) -> dict[str, str]:
        """Who must stay after all, by folder, and why."""
        paths = {entry.path for entry in entries}
        lost = {
            d.candidate.series
            for d in self.decisions
            if d.newest_verified and f"{d.candidate.folder}/{MANIFEST_NAME}" not in paths
        }
        leased = {folder_of(m) for m in marks if m.kind == "lease" and m.runs(self._now)}
        pinned = {m.home for m in marks if m.kind == "pin"}
        quarantined = {folder_of(m) for m in marks if m.kind == "quarantine"}
        out: dict[str, str] = {}
        for decision in wanted:
            item = decision.candidate
            if item.folder in quarantined and item.state == "published":
                out[item.folder] = "it was quarantined meanwhile"
            elif item.folder in leased:
                out[item.folder] = "a reader has leased it meanwhile"
            elif home_of(item.folder) in pinned and item.state in ("published", "broken"):
                out[item.folder] = "it was pinned meanwhile"
            elif item.series in lost and item.state in ("published", "replaced"):
                out[item.folder] = "the newest verified checkpoint was removed meanwhile"
            elif item.state == "unpublished" and f"{item.folder}/{MANIFEST_NAME}" in paths:
                out[item.folder] = "it was published meanwhile"
        return out

    def _remove(
        self, decisions: Iterable[Decision], steps: Steps
    ) -> tuple[list[Decision], list[Failure]]:
        removed: list[Decision] = []
        failures: list[Failure] = []
        for decision in decisions:
            folder = decision.candidate.folder
            try:
                steps.retried(f"remove {folder}", lambda d=decision: self._remove_one(d))
            except VolumeError as error:
                warn("%s could not be removed: %s", folder, error)
                failures.append(Failure(decision=decision, why=str(error)))
            else:
                removed.append(decision)
        return removed, failures

    def _remove_one(self, decision: Decision) -> None:
        item = decision.candidate
        home = home_of(item.folder)
        published = item.state in ("published", "replaced", "broken")
        manifest = f"{item.folder}/{MANIFEST_NAME}"
        with self._volume.exclusive(home, timeout_s=LOCK_TIMEOUT_S):
            if not published and any(
                entry.path == manifest for entry in self._volume.list_committed(item.folder)
            ):
                raise NameTaken(f"{item.label}: it was published meanwhile, and stays")
            remove_attempt(self._volume, item.folder, published=published)
        if not published:
            # What a dead attempt left in this view would be committed with anything else that is written here.
            with contextlib.suppress(OSError, InvalidPath):
                remove_tree(self._volume.local_path(item.folder))


def _prefix(collection: str | None, kind: str | None) -> str:
    assert collection is not None or kind is None, "a kind is looked up within a collection"
    parts = [encode(part) for part in (collection, kind) if part is not None]
    return "/".join(parts)
