"""Protocols: how a rank saves, in place or by copying. What the sweep runs, with the library as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lilo_volume.attempt import Attempt, begin
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.faults import Faults
from lilo_volume.group import Group
from lilo_volume.testing.sweep.case import NODES, WORLD_SIZE
from lilo_volume.volume import Volume

COLLECTION, KIND = "run", "weights"
METADATA = ".metadata"
STRAY = "a-stray"
"""A file that a rank leaves in the attempt's folder and that nobody asked for."""
DEADLINE_S = 10.0
"""Of each wait; ranks that are gone are noticed at once."""


def shard(rank: int) -> str:
    """The file of a rank; deeper than one level, as frameworks have it."""
    return f"miles/__{rank}_0.distcp"


def content(text: str) -> dict[str, bytes]:
    """All files of a checkpoint, told by `text`."""
    return {
        METADATA: text.encode(),
        **{shard(r): b"%d%s" % (r, text.encode()) for r in range(WORLD_SIZE)},
    }


def files_of(rank: int) -> list[str]:
    """What a rank writes."""
    return [shard(rank), *([METADATA] if rank == 0 else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one rank is to save."""

    volume: Volume
    group: Group
    faults: Faults
    name: str
    order: int
    text: str
    """Tells the content."""
    overwrite: bool
    retry: bool

    def begin(self) -> Attempt:
        """Start the attempt."""
        return begin(
            self.volume,
            self.group,
            collection=COLLECTION,
            kind=KIND,
            name=self.name,
            order=self.order,
            overwrite=self.overwrite,
            retry=self.retry,
            timeout_s=DEADLINE_S,
            node=NODES[self.group.rank],
            on_step=self.faults,
        )


Saving: TypeAlias = Callable[[Save], Checkpoint]
"""Run by every rank in its thread."""


def in_place(save: Save) -> Checkpoint:
    """The library's own way: each file is created in the attempt."""
    with save.begin() as attempt:
        write_in_place(save, attempt)
        return attempt.publish(expected=content("").keys(), metadata={"text": save.text})


def write_in_place(save: Save, attempt: Attempt) -> None:
    """Write the files of this rank, and a stray one."""
    for path in files_of(save.group.rank):
        with attempt.create(path) as file:
            file.write(content(save.text)[path])
    if save.group.rank == 1:
        (attempt.folder / STRAY).write_bytes(b"nobody asked for it")


def copying(save: Save) -> Checkpoint:
    """Copying mode: a framework writes into a folder of its own inside the attempt."""
    with save.begin() as attempt:
        source = write_aside(save, attempt)
        return attempt.publish_from(
            source,
            files=files_of(save.group.rank),
            expected=content("").keys(),
            metadata={"text": save.text},
        )


def write_aside(save: Save, attempt: Attempt) -> str:
    """Write the files of this rank as a framework does; returns the folder, relative to the volume's root."""
    folder = attempt.folder / "work" / "_tmp"
    for path in files_of(save.group.rank):
        _write(folder / path, content(save.text)[path])
    if save.group.rank == 1:
        _write(folder / STRAY, b"nobody asked for it")
    return str(folder.relative_to(save.volume.root))


def _write(place: Path, data: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


PROTOCOLS: dict[str, Saving] = {"in place": in_place, "copying": copying}
"""What must hold every invariant."""
