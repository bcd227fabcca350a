"""Retention: which checkpoints stay. A pure decision over what garbage collection found; it removes nothing itself.

What holds whatever the policy says:
- the newest verified checkpoint of a collection and kind stays, unless the end of its own life was set;
- a pinned one stays, one that is quarantined, and one that a reader has leased;
- an attempt that may still run stays;
- what lilo-volume did not make stays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_volume.checkpoint import Checkpoint

CandidateState: TypeAlias = Literal["published", "replaced", "broken", "unpublished", "foreign"]
Verdict: TypeAlias = Literal["keep", "remove", "watch"]
"""`watch`: its age is not known; it is marked now and removed once the mark is old enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A policy. A checkpoint stays if any rule keeps it; with no rule at all, every checkpoint stays.

    Rules count verified checkpoints of one collection and kind, newest first by order, then time.
    """

    keep_last: int | None = None
    """The newest so many."""
    keep_every: int | None = None
    """Those whose order is a multiple of it."""
    keep_best: int | None = None
    """The best so many by `metric`."""
    metric: str | None = None
    """Key of the metadata, whose text is a number; checkpoints without one are never the best."""
    best: Literal["min", "max"] = "min"
    """Which end of `metric` is the best."""
    exempt: Callable[[Checkpoint], bool] | None = None
    """Those for which it says so stay."""
    reader_guard_s: float = 900.0
    """Younger checkpoints, and those replaced less long ago, stay: a reader without a lease may just load them."""
    attempt_guard_s: float = 86_400.0
    """Unpublished attempts younger than this may still run. Longer than any save takes, and than its nodes live on
    after it: what a node commits late, of an attempt that was collected, has no note any more and is foreign."""
    remove_broken: bool = False
    """Whether published checkpoints that are not what their manifest says are removed; they are never loaded."""

    def __post_init__(self) -> None:
        """Refuse what would keep nothing, or has no effect.

        Raises:
            ValueError: with the field.
        """
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{name} is {value}; expected at least 1, or None for no such rule"
                )
        if (self.keep_best is None) != (self.metric is None):
            raise ValueError("keep_best and metric go together; one of them is not given")
        for name in ("reader_guard_s", "attempt_guard_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more seconds")

    @property
    def has_rules(self) -> bool:
        """Whether it removes any checkpoint at all."""
        return not (self.keep_last is self.keep_every is self.keep_best is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One attempt's folder and what is known about it."""

    label: str
    folder: str
    """Relative to the root."""
    state: CandidateState
    series: tuple[str, str]
    """Collection and kind: what is counted together. As encoded if there is no manifest."""
    since_unix_ms: int | None
    """When it was published, replaced or begun; None if that is not known."""
    verified: bool
    why: str
    """What is wrong with it, if something is."""
    size_bytes: int
    checkpoint: Checkpoint | None = None
    """Published ones that can be read."""
    pinned: bool = False
    quarantined: bool = False
    """And not overwritten since."""
    leased_until_unix_ms: int = 0
    expires_unix_ms: int | None = None
    """End of its life, if one is set."""
    doomed: bool = False
    """An earlier collection began to remove it."""
    order: tuple[int, int] = (0, 0)
    """Order and time of publication."""
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one candidate, and why."""

    candidate: Candidate
    verdict: Verdict
    why: str
    newest_verified: bool = False
    """Whether it is the one that must stay; nothing of its series is removed once it is not there."""


def decide(
    candidates: Iterable[Candidate], retention: Retention, *, now_unix_ms: int
) -> list[Decision]:
    """Decide about each candidate, in the order given; pure."""
    items = list(candidates)
    rules = _Rules(items, retention, now_unix_ms)
    return [rules.decision(item) for item in items]


class _Rules:
    """The rules over one set of candidates."""

    def __init__(self, items: list[Candidate], retention: Retention, now_unix_ms: int) -> None:
        self._retention = retention
        self._now = now_unix_ms
        self._newest: set[str] = set()
        self._kept: dict[str, str] = {}
        series: defaultdict[tuple[str, str], list[Candidate]] = defaultdict(list)
        for item in items:
            if item.verified and not self._ends(item):
                series[item.series].append(item)
        for members in series.values():
            members.sort(key=lambda item: item.order, reverse=True)
            self._newest.add(members[0].folder)
            current = [item for item in members if item.state == "published"]
            self._kept |= _kept_by_rules(current, retention)

    def decision(self, item: Candidate) -> Decision:
        """The decision about one."""
        newest = item.folder in self._newest
        verdict, why = self._verdict(item, newest=newest)
        return Decision(candidate=item, verdict=verdict, why=why, newest_verified=newest)

    def _verdict(self, item: Candidate, *, newest: bool) -> tuple[Verdict, str]:
        if item.state == "foreign" and not item.doomed:
            return "keep", "it was not made by lilo-volume"
        if held := self._held(item):
            return "keep", held
        if self._ends(item):
            return "remove", "its life has ended"
        if newest:
            return "keep", "it is the newest verified checkpoint"
        return self._by_state(item)

    def _by_state(self, item: Candidate) -> tuple[Verdict, str]:
        match item.state:
            case "published":
                return self._published(item)
            case "replaced":
                return self._after(item, self._retention.reader_guard_s, "it was overwritten")
            case "broken":
                if not self._retention.remove_broken:
                    return "keep", f"broken, kept for a look: {item.why}"
                return self._after(item, self._retention.reader_guard_s, f"broken: {item.why}")
            case "unpublished":
                return self._after(item, self._retention.attempt_guard_s, "it was abandoned")
            case "foreign":
                return "remove", "its removal was begun before"

    def _held(self, item: Candidate) -> str | None:
        if item.pinned and item.state in ("published", "broken"):
            return "it is pinned"
        if item.quarantined:
            return "it is quarantined"
        if item.leased_until_unix_ms > self._now:
            return (
                f"a reader holds it for {(item.leased_until_unix_ms - self._now) / 1000:.0f} s more"
            )
        return None

    def _ends(self, item: Candidate) -> bool:
        if item.state not in ("published", "replaced", "broken") or self._held(item) is not None:
            return False
        return item.expires_unix_ms is not None and item.expires_unix_ms <= self._now

    def _published(self, item: Candidate) -> tuple[Verdict, str]:
        if not self._retention.has_rules:
            return "keep", "no rule removes checkpoints"
        if (why := self._kept.get(item.folder)) is not None:
            return "keep", why
        exempt = self._retention.exempt
        if exempt is not None and item.checkpoint is not None and exempt(item.checkpoint):
            return "keep", "it is exempt"
        return self._after(item, self._retention.reader_guard_s, "no rule keeps it")

    def _after(self, item: Candidate, guard_s: float, why: str) -> tuple[Verdict, str]:
        """Remove it once it is older than a guard."""
        if item.since_unix_ms is None:
            return "watch", f"{why}, and its age is not known yet"
        if self._now - item.since_unix_ms < guard_s * 1000:
            return "keep", f"{why}, but less than {guard_s:g} s ago"
        return "remove", why


def _kept_by_rules(newest_first: Sequence[Candidate], retention: Retention) -> dict[str, str]:
    """Which are kept by the counting rules, with the rule; by folder."""
    kept: dict[str, str] = {}
    if retention.keep_best is not None and retention.metric is not None:
        ranked = [(value, item) for item in newest_first if (value := _value(item, retention))]
        ranked.sort(key=lambda pair: pair[0].number, reverse=retention.best == "max")
        for _, item in ranked[: retention.keep_best]:
            kept[item.folder] = f"among the best {retention.keep_best} by {retention.metric}"
    if retention.keep_every is not None:
        for item in newest_first:
            if item.order[0] % retention.keep_every == 0:
                kept[item.folder] = f"order {item.order[0]}, every {retention.keep_every} is kept"
    if retention.keep_last is not None:
        for item in newest_first[: retention.keep_last]:
            kept[item.folder] = f"among the last {retention.keep_last}"
    return kept


@dataclass(frozen=True, slots=True)
class _Number:
    number: float


def _value(item: Candidate, retention: Retention) -> _Number | None:
    """The metric of a candidate; None if it has none that can be ranked."""
    assert retention.metric is not None, "checked by the caller"
    try:
        number = float((item.metadata or {}).get(retention.metric, ""))
    except ValueError:
        return None
    return None if math.isnan(number) else _Number(number)
