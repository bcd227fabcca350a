"""Actor: does what a line of a vector says, inside one container, with plain file calls and the volume's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import IO

from lilo_volume.errors import FileMissing, InvalidPath, VolumeBusy, VolumeError
from lilo_volume.testing.emulator.container import Container
from lilo_volume.testing.emulator.emulator import Emulator
from lilo_volume.testing.emulator.server import EmulatedFault

NOTHING = "-"
"""What a vector writes for a file, or a listing, that is not there."""
_ERRORS: tuple[tuple[type[VolumeError], str], ...] = (
    (VolumeBusy, "busy"),
    (EmulatedFault, "fault"),
    (InvalidPath, "invalid"),
    (FileMissing, "notfound"),
)


def word_of(error: VolumeError) -> str:
    """What vectors call an error."""
    return next((word for kind, word in _ERRORS if isinstance(error, kind)), error.kind)


class Actor:
    """The processes of one container."""

    def __init__(self, emulator: Emulator, container: Container) -> None:
        self._emulator = emulator
        self._container = container
        self._open: dict[str, IO[bytes]] = {}

    def do(self, operation: str, args: Sequence[str]) -> str:
        """Do one operation; what `see` and `ls` see, else nothing.

        Raises:
            VolumeError: the volume refused it.
        """
        match operation, list(args):
            case "write", [path, value]:
                self._write(path, value)
            case "open", [path, "r"]:
                self._open[path] = open(self._place(path), "rb")  # noqa: SIM115 - until `close`
            case "open", [path, "w", value]:
                self._write(path, value, keep_open=True)
            case "close", [path]:
                self._open.pop(path).close()
            case "rename", [old, new]:
                os.rename(self._place(old), self._place(new))
            case "rm", [path]:
                self._remove(path)
            case "see", [path]:
                return self._see(path)
            case "ls", [path]:
                return self._list(path)
            case _:
                self._call(operation, list(args))
        return ""

    def end(self) -> None:
        """The processes are gone, with their open files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _call(self, operation: str, args: list[str]) -> None:
        container = self._container
        match operation, args:
            case "commit", []:
                container.commit()
            case "bg", []:
                container.commit_in_background()
            case "reload", []:
                container.reload()
            case "copy", ["-r", *sources, target]:
                container.server.copy(sources, target, recursive=True)
            case "copy", [*sources, target]:
                container.server.copy(sources, target)
            case "fault", ["before"]:
                container.fail_next("commit", "before")
            case "fault", ["after"]:
                container.fail_next("commit", "after")
            case "fault", [when]:
                container.fail_next("commit", "mid", num_paths=int(when.removeprefix("mid")))
            case _:
                raise AssertionError(f"no container can do {operation!r} {args}")
        self._emulator.evict()

    def _place(self, path: str) -> str:
        return f"{self._container.root}/{path}"

    def _write(self, path: str, value: str, *, keep_open: bool = False) -> None:
        place = self._place(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        file = open(place, "wb")  # noqa: SIM115 - some stay open
        file.write(value.encode())
        file.flush()
        if keep_open:
            self._open[path] = file
        else:
            file.close()

    def _remove(self, path: str) -> None:
        place = self._place(path)
        if os.path.isdir(place):
            shutil.rmtree(place)
        else:
            os.unlink(place)

    def _see(self, path: str) -> str:
        try:
            with open(self._place(path), "rb") as file:
                return file.read().decode()
        except (FileNotFoundError, NotADirectoryError):
            return NOTHING

    def _list(self, path: str) -> str:
        try:
            names = os.listdir(self._place(path))
        except FileNotFoundError:
            names = []
        return ",".join(sorted(names)) or NOTHING


class Outside:
    """A client that mounts nothing: every call goes to the server."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def do(self, operation: str, args: Sequence[str]) -> str:
        """Do one operation; what `see` and `ls` see, else nothing.

        Raises:
            VolumeError: the volume refused it.
        """
        server = self._emulator.server
        match operation, list(args):
            case "put", [path, value]:
                server.put(path, value.encode())
            case "rm", [path]:
                server.remove(path)
            case "rm", [path, "-r"]:
                server.remove(path, recursive=True)
            case "copy", [*sources, target]:
                server.copy(sources, target)
            case "see", [path]:
                try:
                    return server.read(path).decode()
                except FileMissing:
                    return NOTHING
            case "ls", [path]:
                return ",".join(server.children(path)) or NOTHING
            case _:
                raise AssertionError(f"a client outside cannot do {operation!r} {args}")
        self._emulator.evict()
        return ""
