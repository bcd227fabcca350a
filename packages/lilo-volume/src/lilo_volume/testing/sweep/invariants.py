"""Invariants: what must hold after any fault, as checks that return what is wrong. Numbers: `INVARIANTS`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.digest import new_hasher
from lilo_volume.errors import ManifestInvalid, VolumeError
from lilo_volume.faults import Stopped
from lilo_volume.manifest import MANIFEST_NAME, Manifest, attempt_folder, parse
from lilo_volume.restore import latest, open_named
from lilo_volume.testing.emulator.emulator import Emulator
from lilo_volume.testing.sweep.case import NODES
from lilo_volume.testing.sweep.protocols import COLLECTION, KIND, STRAY, content, files_of
from lilo_volume.verify import Verify
from lilo_volume.volume import Volume

INVARIANTS: Mapping[str, str] = {
    "I1": "old or new: a reader finds the previous complete checkpoint or the new one",
    "I2": "no false complete: all that a manifest lists is committed, with its digest",
    "I3": "no hang: every live rank returns or raises within its deadline",
    "I4": "agreement: all live ranks succeed, or all raise an error that names the cause, rank and node",
    "I5": "idempotent: publishing again succeeds with the same content, and publishes nothing twice",
    "I6": "retention safety: the newest verified checkpoint is never removed",
    "I7": "no reload on writers",
    "I8": "read back: rank 0 reads its own files without a reload",
    "I9": "no growth: collected, the volume holds what is kept and nothing else",
    "I10": "stray files are neither listed nor in the way",
}
"""Of the sweep, by number."""


def committed_faults(emulator: Emulator) -> list[tuple[str, str]]:
    """I2, I10: every manifest in the committed state against the files there."""
    server, found = emulator.server, list[tuple[str, str]]()
    paths = {entry.path for entry in server.list()}
    for path in paths:
        if not path.endswith(f"/{MANIFEST_NAME}"):
            continue
        try:
            manifest = _parsed(server.read(path))
        except ManifestInvalid as error:
            found.append(("I2", f"{path}: {error}"))
            continue
        for entry in manifest.files:
            place = f"{attempt_folder(manifest.publication)}/{entry.path}"
            hasher = new_hasher(entry.algorithm)
            assert hasher is not None, "it was written here"
            hasher.update(server.read(place) if place in paths else b"missing")
            if place not in paths or hasher.hexdigest() != entry.digest:
                found.append(
                    ("I2", f"{path} lists {entry.path}, which is not committed as it says")
                )
            if entry.path == STRAY:
                found.append(("I10", f"{path} lists a stray file"))
    return found


@functools.lru_cache(maxsize=64)
def _parsed(data: bytes) -> Manifest:
    return parse(data)


def reader_faults(
    volume: Volume, name: str, texts: Sequence[str], *, explicit: bool, level: Verify = "size"
) -> list[tuple[str, str]]:
    """I1: what a reader of `volume` finds must be one of `texts`, whole."""
    try:
        found = latest(volume, COLLECTION, KIND, verify=level).checkpoint
        if explicit:
            found = open_named(volume, COLLECTION, KIND, name, verify=level)
    except VolumeError as error:
        return [("I1", f"a reader gets {type(error).__name__}: {error}")]
    text = None if found is None else _text(volume, found.manifest)
    if text not in texts:
        return [("I1", f"a reader finds {text!r}, expected one of {list(texts)}")]
    return []


def _text(volume: Volume, manifest: Manifest) -> str:
    """Which checkpoint this is, if it is whole; else what is wrong."""
    text, folder = manifest.metadata.get("text", "?"), attempt_folder(manifest.publication)
    names, wanted = {entry.path for entry in manifest.files}, content(text)
    if names != wanted.keys():
        return f"{text} with {len(names)} of {len(wanted)} files"
    wrong = [p for p in wanted if volume.read_committed(f"{folder}/{p}") != wanted[p]]
    return f"{text} with {wrong} of another" if wrong else text


def agreement_faults(
    outcomes: Sequence[object], rank: int, *, struck: bool
) -> list[tuple[str, str]]:
    """I3, I4: what the ranks returned or raised; `rank` is the one that had a fault, if it `struck`."""
    live = [outcome for outcome in outcomes if not isinstance(outcome, Stopped)]
    if any(outcome is None for outcome in live):
        return [("I3", "a rank neither returned nor raised within its deadline")]
    errors = [outcome for outcome in live if isinstance(outcome, BaseException)]
    if len({id(m) if isinstance(m, BaseException) else m for m in _manifests(live)}) > 1:
        return [("I4", "ranks returned different checkpoints")]
    if errors and len(errors) < len(live):
        return [("I4", f"{len(errors)} of {len(live)} live ranks raised: {errors[0]!r}")]
    for error in errors:
        if not isinstance(error, VolumeError):
            return [("I4", f"a rank raised {type(error).__name__}: {error}")]
    if errors and struck and len(live) > 1:
        texts = [" ".join([str(e), *getattr(e, "__notes__", ())]) for e in errors]
        if not any(f"rank {rank} on node {NODES[rank]}" in text for text in texts):
            return [("I4", f"no error names rank {rank} and its node: {texts[0]}")]
    return []


def _manifests(outcomes: Sequence[object]) -> list[bytes]:
    return [o.manifest.to_bytes() for o in outcomes if isinstance(o, Checkpoint)]


def again_faults(outcomes: Sequence[object], before: Manifest | None) -> list[tuple[str, str]]:
    """I5: publishing again, without a fault, after `before` was published or not."""
    for outcome in outcomes:
        if not isinstance(outcome, Checkpoint):
            return [("I5", f"publishing again raised {outcome!r}")]
        if before is not None and outcome.manifest != before:
            return [("I5", "it was published twice")]
    return []


def read_back_faults(outcome: object, text: str) -> list[tuple[str, str]]:
    """I8: rank 0's own files, in its view, without a reload."""
    if not isinstance(outcome, Checkpoint):
        return []
    for path in files_of(0):
        place = outcome.folder / path
        if not place.exists() or place.read_bytes() != content(text)[path]:
            return [("I8", f"rank 0 does not read {path} back")]
    return []
