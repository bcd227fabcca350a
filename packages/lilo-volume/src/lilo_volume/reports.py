"""Reports: what ranks bring to a publication, and whether it adds up. Pure; used by `publish`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from lilo_volume.errors import MissingFiles, PublishRefused, RankFailed, UnexpectedFiles
from lilo_volume.manifest import FileEntry


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank brings to the publication."""

    files: tuple[FileEntry, ...]
    """Sorted by path."""
    expected: tuple[str, ...] | None
    failure: str | None

    @classmethod
    def of(
        cls, files: Iterable[FileEntry], expected: tuple[str, ...] | None, failure: str | None
    ) -> Report:
        """A report with its files in order."""
        return cls(tuple(sorted(files, key=lambda entry: entry.path)), expected, failure)


def checked_files(
    label: str, nodes: tuple[str, ...], reports: list[Report]
) -> tuple[FileEntry, ...]:
    """All files of all ranks, sorted; pure.

    Raises:
        RankFailed: a rank says so; the lowest one is named.
        MissingFiles, UnexpectedFiles: they are not what was expected, or two ranks wrote the same.
    """
    for rank, report in enumerate(reports):
        if report.failure is not None:
            raise RankFailed(label, rank, nodes[rank], report.failure)
    files = sorted((e for report in reports for e in report.files), key=lambda e: e.path)
    paths = [entry.path.casefold() for entry in files]
    twice = {path for path, following in itertools.pairwise(paths) if path == following}
    if twice:
        raise UnexpectedFiles(label, tuple(sorted(twice)), "were written twice")
    have = {entry.path for entry in files}
    declared = any(report.expected is not None for report in reports)
    expected = expected_by(reports)
    if missing := sorted(expected - have):
        sources = sources_of(_asked(reports, missing), nodes)
        raise MissingFiles(label, tuple(missing), len(expected), sources)
    if declared and (extra := sorted(have - expected)):
        raise UnexpectedFiles(label, tuple(extra), "nobody expected")
    if not files:
        raise PublishRefused(f"checkpoint {label!r} has no files; a checkpoint has at least one")
    return tuple(files)


def without_repeats(reports: list[Report]) -> list[Report]:
    """Reports in which a file that several nodes see alike is the first one's: their views may be one."""
    seen: set[FileEntry] = set()
    kept: list[Report] = []
    for report in reports:
        files = tuple(entry for entry in report.files if entry not in seen)
        seen.update(files)
        kept.append(Report(files, report.expected, report.failure))
    return kept


def expected_by(reports: list[Report]) -> frozenset[str]:
    """All files that any rank declared before."""
    wanted = [report.expected for report in reports if report.expected is not None]
    return frozenset[str]().union(*wanted)


def _asked(reports: list[Report], missing: list[str]) -> list[int]:
    """Ranks that alone declared a missing file, and so should have written it; none if all declared all."""
    ranks = [r for r, report in enumerate(reports) if set(missing) & set(report.expected or ())]
    return [] if len(ranks) == len(reports) else ranks


def sources_of(ranks: Iterable[int], nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Ranks and their nodes, in words."""
    return tuple(f"rank {rank} on node {nodes[rank]}" for rank in ranks)
