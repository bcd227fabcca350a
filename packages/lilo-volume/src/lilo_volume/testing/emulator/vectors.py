"""Vectors: small histories of containers and a client outside, with what each must see. See `VECTORS`.

One line each: who, what, and after `=` what is seen (`-`: nothing), or after `!!` the error that it must raise.
`A`, `B`, `C`, `R` are containers, mounted at their first line; `S` is a client outside.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lilo_volume.errors import VolumeError
from lilo_volume.testing.emulator.actor import Actor, Outside, word_of
from lilo_volume.testing.emulator.emulator import Emulator
from lilo_volume.testing.emulator.modes import Modes

OUTSIDE = "S"
_ENDINGS = ("crash", "exit")


@dataclass(frozen=True, slots=True)
class Vector:
    """One history."""

    name: str
    title: str
    modes: Modes
    lines: tuple[str, ...]


class Driver(Protocol):
    """Runs lines, in one process or in several."""

    def do(self, who: str, operation: str, args: list[str]) -> tuple[str, str]:
        """What was seen, and the word for the error that was raised; each empty if there is none."""
        ...


def parse_vectors(text: str) -> list[Vector]:
    """All vectors of a text."""
    return [_parse(block.splitlines()) for block in text.strip().split("\n\n")]


def _parse(lines: list[str]) -> Vector:
    name, _, title = lines[0].partition(" ")
    modes = Modes()
    if title.startswith("["):
        setting, _, title = title[1:].partition("] ")
        key, value = setting.split("=")
        modes = replace(modes, **{key: {"True": True, "False": False}.get(value, value)})
    return Vector(name, title, modes, tuple(lines[1:]))


VECTORS: tuple[Vector, ...] = tuple(
    parse_vectors(resources.files(__package__ or "").joinpath("vectors.txt").read_text("ascii"))
)
"""The histories that every emulation of such a volume must reproduce."""


def run_vector(vector: Vector, driver: Driver) -> None:
    """Run every line.

    Raises:
        AssertionError: something else was seen, or raised.
    """
    for line in vector.lines:
        action, _, wanted_error = line.partition(" !! ")
        action, _, wanted = action.partition(" = ")
        who, operation, *args = action.split()
        seen, error = driver.do(who, operation, args)
        assert error == wanted_error, f"{vector.name}: {line!r} raised {error or 'nothing'}"
        assert seen == wanted, f"{vector.name}: {line!r} saw {seen!r}"


class InProcess:
    """All containers in this process."""

    def __init__(self, folder: Path, modes: Modes) -> None:
        """Emulate below `folder`."""
        self._emulator = Emulator(folder, modes=modes)
        self._outside = Outside(self._emulator)
        self._running: dict[str, tuple[Actor, Any]] = {}

    def do(self, who: str, operation: str, args: list[str]) -> tuple[str, str]:
        """Run one line."""
        try:
            if who == OUTSIDE:
                return self._outside.do(operation, args), ""
            if who not in self._running:
                container = self._emulator.mount(who)
                self._running[who] = Actor(self._emulator, container), container
            actor, container = self._running[who]
            if operation in _ENDINGS:
                actor.end()
                getattr(container, operation)()
                del self._running[who]
                return "", ""
            return actor.do(operation, args), ""
        except VolumeError as error:
            return "", word_of(error)

    def close(self) -> None:
        """Close what is still open."""
        for actor, _ in self._running.values():
            actor.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class OneProcessEach:
    """Every container in a process of its own; crashes are kills. One object may run many vectors."""

    def __init__(self) -> None:
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self._running: dict[str, Any] = {}
        self._emulator: Emulator | None = None

    def use(self, folder: Path, modes: Modes) -> Self:
        """Start afresh below `folder`; the processes are kept."""
        self._emulator = Emulator(folder, modes=modes, shared=True)
        self._running.clear()
        return self

    def do(self, who: str, operation: str, args: list[str]) -> tuple[str, str]:
        """Run one line."""
        assert self._emulator is not None, "call `use` first"
        try:
            if who == OUTSIDE:
                return Outside(self._emulator).do(operation, args), ""
            if who not in self._running:
                self._start(who, self._emulator)
            if operation in _ENDINGS:
                return self._end(who, operation)
            return self._ask(who, [operation, args])
        except VolumeError as error:
            return "", word_of(error)

    def close(self) -> None:
        """End all processes."""
        for who in list(self._workers):
            self._kill(who)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, who: str, emulator: Emulator) -> None:
        container = emulator.mount(who)
        if who not in self._workers:
            self._workers[who] = subprocess.Popen(
                [sys.executable, "-m", "lilo_volume.testing.emulator.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._running[who] = container
        place = str(container.root.parent.parent.parent)
        self._ask(who, ["use", [place, container.task_id, asdict(emulator.modes)]])

    def _end(self, who: str, operation: str) -> tuple[str, str]:
        self._kill(who)
        getattr(self._running.pop(who), operation)()
        return "", ""

    def _ask(self, who: str, message: list[Any]) -> tuple[str, str]:
        process = self._workers[who]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return answer["seen"], answer["error"]

    def _kill(self, who: str) -> None:
        process = self._workers.pop(who)
        process.kill()
        with process:
            process.wait()
