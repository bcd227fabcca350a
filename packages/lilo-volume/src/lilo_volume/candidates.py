"""Candidates: what a volume holds, as retention needs to see it. Looks and decides nothing. Used by `gc.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.errors import InvalidPath, VolumeError
from lilo_volume.manifest import RECORD_NAME
from lilo_volume.marks import Mark, marks_of
from lilo_volume.naming import decode, encode
from lilo_volume.record import begun_in
from lilo_volume.retention import Candidate, CandidateState
from lilo_volume.scan import Found, newest, scan
from lilo_volume.ttl import expiry_among
from lilo_volume.verify import Verify, find_fault
from lilo_volume.volume import Volume


@dataclass(slots=True)
class Name:
    """The attempts and marks of one name."""

    home: str
    found: list[Found] = field(default_factory=list[Found])
    marks: list[Mark] = field(default_factory=list[Mark])


def names_in(volume: Volume, prefix: str) -> list[Name]:
    """Every name below `prefix`, sorted."""
    # Marks first: one whose attempt is not listed after it is about nothing.
    names: dict[str, Name] = {}
    for mark in marks_of(volume.list_committed(prefix)):
        names.setdefault(mark.home, Name(mark.home)).marks.append(mark)
    for found in scan(volume, prefix):
        home = home_of(found.folder)
        names.setdefault(home, Name(home)).found.append(found)
    return [name for _, name in sorted(names.items())]


def candidates_of(volume: Volume, name: Name, level: Verify) -> list[Candidate]:
    """The attempts of a name, verified."""
    current = newest(name.found)
    faults = {
        found.folder: find_fault(volume, found, level) for found in name.found if found.published
    }
    return [_candidate(volume, name, found, current, faults) for found in name.found]


def home_of(folder: str) -> str:
    """The folder of the name that an attempt's folder is in."""
    return folder.rpartition("/")[0]


def attempt_of(folder: str) -> str:
    """The attempt of a folder, as marks have it; of a foreign folder, its name as it is."""
    part = folder.rpartition("/")[2]
    try:
        return decode(part) or part
    except InvalidPath:
        return part


def folder_of(mark: Mark) -> str:
    """The attempt's folder that a mark is about."""
    return f"{mark.home}/{encode(mark.attempt)}"


def _candidate(
    volume: Volume, name: Name, found: Found, current: Found | None, faults: dict[str, str | None]
) -> Candidate:
    manifest = found.manifest
    state = _state(found, current, faults)
    attempt = attempt_of(found.folder)
    about = [mark for mark in name.marks if mark.attempt == attempt]
    dooms = [mark for mark in about if mark.kind == "doom"]
    pinned = any(mark.kind == "pin" for mark in name.marks)
    where = None if manifest is None else manifest.publication
    return Candidate(
        label=found.label,
        folder=found.folder,
        state=state,
        series=(found.name_part(0), found.name_part(1)),
        since_unix_ms=_since(volume, found, state, current, dooms),
        verified=found.published and faults[found.folder] is None,
        why=faults.get(found.folder) or "",
        size_bytes=sum(found.sizes.values()),
        checkpoint=None if manifest is None else Checkpoint.of(volume, manifest),
        pinned=pinned and (found is current or current is None),
        quarantined=found.quarantined and found is current,
        leased_until_unix_ms=max(
            (m.expires_unix_ms for m in about if m.kind == "lease"), default=0
        ),
        expires_unix_ms=expiry_among(about, attempt),
        doomed=bool(dooms),
        order=(0, 0)
        if manifest is None or where is None
        else (where.order, manifest.created_unix_ms),
        metadata=None if manifest is None else manifest.metadata,
    )


def _state(found: Found, current: Found | None, faults: dict[str, str | None]) -> CandidateState:
    if not found.published:
        return "unpublished" if found.ours else "foreign"
    if faults[found.folder] is not None:
        return "broken"
    # What was overwritten by a broken one is still what readers fall back to.
    if found is current or current is None or faults[current.folder] is not None:
        return "published"
    return "replaced"


def _since(
    volume: Volume,
    found: Found,
    state: CandidateState,
    current: Found | None,
    dooms: list[Mark],
) -> int | None:
    if state == "replaced" and current is not None and current.manifest is not None:
        return current.manifest.created_unix_ms
    if found.manifest is not None:
        return found.manifest.created_unix_ms
    if (begun := _begun(volume, found)) is not None:
        return begun
    return min((doom.created_unix_ms for doom in dooms), default=None)


def _begun(volume: Volume, found: Found) -> int | None:
    """When the attempt began, by its note; None if that cannot be read."""
    if RECORD_NAME not in found.sizes:
        return None
    try:
        return begun_in(volume.read_committed(f"{found.folder}/{RECORD_NAME}"))
    except VolumeError:
        return None
