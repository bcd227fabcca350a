"""Server: the committed state, and the calls that act on it alone, from anywhere, seeing nobody's view (R12-R14)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lilo_volume.errors import FileMissing, InvalidPath, VolumeFull, VolumeUnavailable
from lilo_volume.naming import check_relative
from lilo_volume.testing.emulator.medium import Medium, Table
from lilo_volume.testing.emulator.modes import Modes
from lilo_volume.volume import Entry

V1_MAX_FILES = 500_000


class EmulatedFault(VolumeUnavailable):
    """The server did not answer, because the modes or a test said so."""


@dataclass(frozen=True, slots=True)
class Put:
    """A path that a commit sets."""

    kind: str
    data: bytes


class Server:
    """One volume's committed state: path -> [token, size, kind, author, time of commit]."""

    def __init__(self, medium: Medium, modes: Modes, volume_id: str) -> None:
        """Act on the volume `volume_id`, which is empty if it was never used."""
        self._medium = medium
        self._modes = modes
        self._table = f"committed-{volume_id}"
        self._shuffle = random.Random(modes.seed)
        self._removed: list[str] = []

    def apply(self, changes: Sequence[tuple[str, Put | None]], *, author: str) -> None:
        """Set and remove paths, all at once.

        Raises:
            VolumeFull: more than fits; nothing was changed.
        """
        self._delay()
        with self._medium.locked(self._table) as table:
            self._check_room(table, changes)
            gone = [path for path, put in changes if put is None and path in table]
            for path, put in changes:
                if put is None:
                    table.pop(path, None)
                else:
                    token = self._medium.put(put.data)
                    table[path] = [token, len(put.data), put.kind, author, time.monotonic()]
            self._removed.extend(gone)

    def take_removed(self) -> list[str]:
        """Paths that were removed since the last call, for views whose reads then fail (R18)."""
        taken, self._removed = self._removed, []
        return taken

    def snapshot(self) -> dict[str, tuple[str, str]]:
        """Token and kind of every path."""
        self._delay()
        with self._medium.locked(self._table) as table:
            return {path: (item[0], item[2]) for path, item in table.items()}

    def blob(self, token: str) -> bytes:
        """The bytes behind a token of a snapshot."""
        return self._medium.get(token)

    def put(self, path: str, data: bytes) -> None:
        """Upload a file from outside."""
        self.apply([(check_relative(path), Put("f", data))], author="")

    def list(self, prefix: str = "", *, viewer: str = "", lag_s: float = 0.0) -> list[Entry]:
        """All files below a folder; what others than `viewer` committed less than `lag_s` ago does not show."""
        if prefix:
            check_relative(prefix)
        self._delay()
        start, now = f"{prefix}/" if prefix else "", time.monotonic()
        with self._medium.locked(self._table) as table:
            found = [
                Entry(path=path, size_bytes=size)
                for path, (_, size, kind, author, when) in table.items()
                if path.startswith(start)
                and kind == "f"
                and (author == viewer or now - when >= lag_s)
            ]
        found.sort(key=lambda entry: entry.path)
        if self._modes.seed:
            self._shuffle.shuffle(found)
        return found

    def children(self, folder: str) -> list[str]:
        """Names directly below a folder, sorted."""
        with self._medium.locked(self._table) as table:
            return sorted(_children(table, folder))

    def read(self, path: str, *, viewer: str = "", lag_s: float = 0.0) -> bytes:
        """The bytes of a file.

        Raises:
            FileMissing: there is none, or it does not show yet.
        """
        check_relative(path)
        self._delay()
        with self._medium.locked(self._table) as table:
            item = table.get(path)
        hidden = item and item[3] != viewer and time.monotonic() - item[4] < lag_s
        if item is None or hidden or item[2] != "f":
            raise FileMissing(f"there is no file {path!r} in the committed state")
        return self._medium.get(item[0])

    def copy(
        self,
        sources: Sequence[str],
        target: str,
        *,
        recursive: bool = False,
        stop_after: int | None = None,
    ) -> None:
        """Copy as `cp` does (R13); `stop_after` paths the call dies.

        Raises:
            InvalidPath: several sources without an existing folder, or a folder without `recursive`.
            FileMissing: a source is not there; earlier ones stay, or not, by mode.
            EmulatedFault: it was stopped.
        """
        for path in (*sources, target):
            check_relative(path)
        if recursive and self._modes.version == 1:
            raise InvalidPath("recursive copies need version 2 of a volume")
        self._delay()
        error: Exception | None = None
        with self._medium.locked(self._table) as table:
            into = bool(_below(table, target))
            if len(sources) > 1 and not into:
                raise InvalidPath(f"several sources need an existing folder; {target!r} is none")
            moves: list[tuple[str, str]] = []
            try:
                for source in sources:
                    moves.extend(_moves(table, source, target, into=into, recursive=recursive))
            except (FileMissing, InvalidPath) as found:
                error = found
                moves = moves if self._modes.copy_partial else []
            if stop_after is not None and stop_after < len(moves):
                moves, error = moves[:stop_after], EmulatedFault("the copy stopped half-way")
            now = time.monotonic()
            table.update({to: [*table[source][:3], "", now] for source, to in moves})
        if error is not None:
            raise error

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or a folder with `recursive`.

        Raises:
            FileMissing: there is nothing.
            InvalidPath: it is a folder.
        """
        check_relative(path)
        self._delay()
        with self._medium.locked(self._table) as table:
            gone = [path] if path in table else _below(table, path)
            if not gone:
                raise FileMissing(f"there is nothing at {path!r} in the committed state")
            if path not in table and not recursive:
                raise InvalidPath(f"{path!r} is a folder; pass recursive=True to remove it")
            for name in gone:
                del table[name]
            self._removed.extend(gone)

    def _delay(self) -> None:
        if self._modes.latency_s:
            time.sleep(self._modes.latency_s)

    def _check_room(self, table: Table, changes: Sequence[tuple[str, Put | None]]) -> None:
        modes = self._modes
        puts = {path: put for path, put in changes if put is not None}
        gone = {path for path, put in changes if put is None}
        after = (table.keys() | puts.keys()) - gone
        most = modes.max_files or (V1_MAX_FILES if modes.version == 1 else None)
        if most is not None and len(after) > most:
            raise VolumeFull(f"{len(after)} files, the volume holds {most}")
        if any(len(put.data) > modes.max_file_bytes for put in puts.values()):
            raise VolumeFull(f"a file has more than {modes.max_file_bytes} bytes")
        if modes.quota_bytes is not None:
            kept = sum(table[path][1] for path in after if path in table and path not in puts)
            if kept + sum(len(put.data) for put in puts.values()) > modes.quota_bytes:
                raise VolumeFull(f"more than {modes.quota_bytes} bytes")
        limit = modes.max_folder_entries
        if limit is not None and len(after) > limit:
            for folder in {path.rpartition("/")[0] for path in puts}:
                if len(_children(after, folder)) > limit:
                    raise VolumeFull(f"more than {limit} entries in {folder!r}")


def _below(paths: Iterable[str], folder: str) -> list[str]:
    start = f"{folder}/" if folder else ""
    return [path for path in paths if path.startswith(start)]


def _children(paths: Iterable[str], folder: str) -> set[str]:
    skip = len(folder) + 1 if folder else 0
    return {path[skip:].split("/")[0] for path in _below(paths, folder)}


def _moves(
    table: Table, source: str, target: str, *, into: bool, recursive: bool
) -> list[tuple[str, str]]:
    """From and to of each file that a copy of `source` makes."""
    name = source.rpartition("/")[2]
    place = f"{target}/{name}" if into else target
    if source in table:
        return [(source, place)]
    below = _below(table, source)
    if not below:
        raise FileMissing(f"there is nothing at {source!r} in the committed state")
    if not recursive or target in table:
        raise InvalidPath(
            f"{source!r} is a folder; copying it needs recursive, and no file as target"
        )
    return [(path, f"{place}{path[len(source) :]}") for path in below]
