"""Scan: what the committed state holds, told from file names and manifests alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lilo_volume.errors import FileMissing, InvalidPath, ManifestInvalid
from lilo_volume.log import warn
from lilo_volume.manifest import MANIFEST_NAME, RECORD_NAME, Manifest, attempt_folder, parse
from lilo_volume.naming import decode
from lilo_volume.volume import Entry, Volume

_DEPTH = 4
"""Collection, kind, name, attempt."""
_QUARANTINE = ".quarantine-"
"""How the mark of a quarantined attempt begins (`marks.py`, which is not imported here: few need it at once)."""
_LOOKS = 20
"""Listings until two in a row agree; each publication or removal meanwhile costs one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One attempt's folder."""

    folder: str
    """Relative to the root."""
    sizes: Mapping[str, int]
    """Bytes by path inside the folder, of all files there."""
    manifest: Manifest | None
    fault: str | None
    """Why there is no manifest though there is a manifest file; None also when there is no such file."""
    quarantined: bool = False
    """Whether somebody said that it must not be loaded."""

    @property
    def published(self) -> bool:
        """Whether there is a manifest file, good or bad."""
        return self.manifest is not None or self.fault is not None

    @property
    def ours(self) -> bool:
        """Whether lilo-volume made it; what others put there is never touched."""
        # A process that died while it wrote the note leaves the note's temporary name.
        begun = RECORD_NAME in self.sizes or f"{RECORD_NAME}.tmp" in self.sizes
        return begun or self.published

    def name_part(self, index: int) -> str:
        """Collection (0), kind (1) or name (2): from the manifest, or read off the folder, else as encoded."""
        if self.manifest is not None:
            where = self.manifest.publication
            return (where.collection, where.kind, where.name)[index]
        part = self.folder.split("/")[index]
        try:
            text = decode(part)
        except InvalidPath:
            text = None
        return part if text is None else text

    @property
    def label(self) -> str:
        """Collection, kind and name, for messages."""
        return "/".join(self.name_part(i) for i in range(3))


def scan(volume: Volume, prefix: str = "") -> list[Found]:
    """Every attempt below `prefix`, sorted by folder. Other files on the volume are passed over."""
    return _told(volume, volume.list_committed(prefix))


def settled_scan(volume: Volume, prefix: str = "") -> list[Found]:
    """A scan of what was there all at once: for readers, who must get the old or the new while others publish.

    One listing is not enough: an old attempt may be looked at after it was replaced, and the new one before it was
    published. When two listings in a row have the same manifests, then these were there between the two.
    """
    entries = volume.list_committed(prefix)
    for _ in range(_LOOKS):
        found = _told(volume, entries)
        again = volume.list_committed(prefix)
        if _manifests(entries) == _manifests(again):
            return found
        entries = again
    warn("%r changes all the time; what was seen last counts", prefix)
    return _told(volume, entries)


def _manifests(entries: Iterable[Entry]) -> set[str]:
    return {entry.path for entry in entries if entry.path.endswith(f"/{MANIFEST_NAME}")}


def _told(volume: Volume, entries: Iterable[Entry]) -> list[Found]:
    folders: dict[str, dict[str, int]] = {}
    quarantined: set[str] = set()
    for entry in entries:
        parts = entry.path.split("/", _DEPTH)
        if len(parts) > _DEPTH:
            sizes = folders.setdefault("/".join(parts[:_DEPTH]), {})
            sizes[parts[_DEPTH]] = entry.size_bytes
        elif parts[-1].startswith(_QUARANTINE):
            attempt = parts[-1].removeprefix(_QUARANTINE).rsplit("-", 3)[0]
            quarantined.add("/".join([*parts[:-1], attempt]))
    return [
        found
        for folder, sizes in sorted(folders.items())
        if (found := _look(volume, folder, sizes, folder in quarantined)) is not None
    ]


def _look(volume: Volume, folder: str, sizes: Mapping[str, int], quarantined: bool) -> Found | None:
    manifest, fault = None, None
    if MANIFEST_NAME in sizes:
        try:
            manifest = parse(volume.read_committed(f"{folder}/{MANIFEST_NAME}"))
            if (home := attempt_folder(manifest.publication)) != folder:
                manifest, fault = None, f"its manifest belongs to {home}; it was copied or moved"
        except FileMissing:
            return None  # removed since it was listed
        except ManifestInvalid as error:
            fault = f"manifest: {error}"
    return Found(
        folder=folder, sizes=sizes, manifest=manifest, fault=fault, quarantined=quarantined
    )


def newest(found: list[Found]) -> Found | None:
    """Of attempts of one name: the one published last, which overwrote the others."""
    good = [item for item in found if item.manifest is not None]
    return max(good, key=_age) if good else None


def _age(item: Found) -> tuple[int, str]:
    assert item.manifest is not None, "only published attempts are compared"
    return item.manifest.created_unix_ms, item.manifest.publication.attempt


def remove_attempt(volume: Volume, folder: str, *, published: bool = True) -> None:
    """Remove an attempt so that it is gone at once: its manifest first, then the rest. Already gone: nothing."""
    with contextlib.suppress(FileMissing):
        if published:
            volume.remove_committed(f"{folder}/{MANIFEST_NAME}")
    with contextlib.suppress(FileMissing):
        volume.remove_committed(folder, recursive=True)
