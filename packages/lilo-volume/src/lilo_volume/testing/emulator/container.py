"""Container: one view of an emulated volume, with what its processes wrote and did not commit yet (R1-R11).

Any process of the machine may act for it (`Emulator.attach`), as children of a container may.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeAlias

from lilo_volume.errors import InvalidPath, VolumeBusy, VolumeError, VolumeUnavailable
from lilo_volume.log import warn
from lilo_volume.testing.emulator import view
from lilo_volume.testing.emulator.medium import Medium, Table
from lilo_volume.testing.emulator.modes import Modes
from lilo_volume.testing.emulator.open_files import OpenFile, open_files
from lilo_volume.testing.emulator.server import EmulatedFault, Put, Server
from lilo_volume.testing.emulator.view import Seen

When: TypeAlias = Literal["before", "after", "mid"]
_RANDOM_SHARE = 0.3


class Container:
    """One container that mounts the volume. Made by `Emulator.mount`."""

    def __init__(
        self,
        medium: Medium,
        server: Server,
        modes: Modes,
        task_id: str,
        place: Path,
        *,
        shared: bool,
        lag_s: float,
        evict: Callable[[], None],
    ) -> None:
        """Act for the container `task_id`, whose view is below `place`."""
        self.task_id = task_id
        self.server = server
        self.lag_s = lag_s
        """How long what others committed takes to show in listings that this container asks for."""
        self.calls: Counter[str] = Counter()
        """How often this process asked for each call on behalf of the container."""
        self._medium = medium
        self._modes = modes
        self._root = str(place / "view")
        self._shared = shared
        self._evict = evict
        # By the name without its random end, so that a history can be repeated.
        self._random = random.Random(f"{modes.seed} {task_id.rpartition('-')[0]}")

    @property
    def root(self) -> Path:
        """Where the view is mounted."""
        return Path(self._root)

    @property
    def mounted(self) -> bool:
        """Whether the container still runs."""
        with self._state() as state:
            return bool(state.get("mounted"))

    def mount(self) -> None:
        """Start: the view is the latest committed state (R1)."""
        with self._state() as state:
            os.makedirs(self._root)
            state.update(mounted=True, base={}, tried={}, script=[])
            self._fetch(state)

    def commit(self) -> None:
        """Make what was written here part of the committed state (R3, R4).

        Raises:
            EmulatedFault: a fault was due; it may have been applied.
            VolumeBusy: files are open, and this commit also reloads; it was applied.
            VolumeFull: it does not fit.
        """
        self.calls["commit"] += 1
        self.background()
        with self._medium.slot(self._modes.max_concurrent_commits), self._state() as state:
            self._must_run(state)
            when, count = self._due(state, "commit")
            if when == "before":
                raise EmulatedFault("commit: no answer")
            self._push(state, stop_after=count if when == "mid" else None)
            if when == "after":
                raise EmulatedFault("commit: no answer")
            self._settle(state)
            if self._modes.commit_reload == "on":
                self._reload(state)

    def reload(self) -> None:
        """Bring the view up to the committed state (R6).

        Raises:
            VolumeBusy: a file is open or a process is inside; nothing changed.
        """
        self.calls["reload"] += 1
        self.background()
        with self._state() as state:
            self._must_run(state)
            self._reload(state)

    def background(self) -> None:
        """A moment at which the volume may commit on its own (R8), by mode."""
        self._evict()
        mode = self._modes.background
        if mode == "adversarial" or (mode == "random" and self._random.random() < _RANDOM_SHARE):
            self.commit_in_background()

    def commit_in_background(self) -> None:
        """A commit that nobody called for: it never reloads, and what goes wrong is only logged."""
        with self._state() as state:
            if state.get("mounted"):
                try:
                    self._push(state, stop_after=None)
                    self._settle(state)
                except VolumeError as error:
                    warn("background commit of %s: %s", self.task_id, error)

    def crash(self) -> None:
        """End at once: what was not committed is lost (R11)."""
        with self._state() as state:
            state.update(mounted=False, base={})
        shutil.rmtree(self._root, ignore_errors=True)

    def exit(self) -> None:
        """End in order: commit once; a failure is only logged (R11)."""
        self.commit_in_background()
        self.crash()

    def fail_next(self, call: str, when: When, *, num_paths: int = 1) -> None:
        """Let the next `call` (`commit`, `copy`, `remove`, `list`, `read`) fail; `mid`: after `num_paths` paths."""
        with self._state() as state:
            state["script"].append([call, when, num_paths])

    def due(self, call: str, key: str = "") -> tuple[str, int]:
        """Whether a fault hits this call to the server, and where: see `EmulatedVolume`."""
        with self._state() as state:
            self._must_run(state)
            return self._due(state, call, key)

    def open_files(self) -> list[OpenFile]:
        """What is open in the view, over all processes that could have it open."""
        return open_files(os.path.realpath(self._root), all_processes=self._shared)

    def forget(self, paths: list[str]) -> None:
        """What was removed on the server can no longer be read here, unless it is open or was changed (R18)."""
        with self._state() as state:
            held = {file.path for file in self.open_files()}
            seen = view.look(self._root)
            for path in paths:
                base = state.get("base", {})
                if (
                    path in seen
                    and path not in held
                    and base.get(path, [0])[1:] == view.identity(seen[path])
                ):
                    del base[path]
                    view.remove(self._root, path)

    def _state(self) -> AbstractContextManager[Table]:
        return self._medium.locked(f"container-{self.task_id}")

    def _must_run(self, state: Table) -> None:
        if not state.get("mounted"):
            raise VolumeUnavailable(
                f"the volume is not mounted in container {self.task_id!r} any more"
            )

    def _due(self, state: Table, call: str, key: str = "") -> tuple[str, int]:
        """Which fault hits: the next one of the script, else by mode each call's first try."""
        for item in state["script"]:
            if item[0] == call:
                state["script"].remove(item)
                return item[1], item[2]
        if self._modes.rpc_faults == "none":
            return "none", 0
        name = f"{call} {key}"
        state["tried"][name] = not state["tried"].get(name, False)
        half_way = 1 if self._modes.commit_order == "sorted" else self._random.randint(1, 5)
        return (self._modes.rpc_faults, half_way) if state["tried"][name] else ("none", 0)

    def _changes(self, state: Table) -> tuple[list[tuple[str, Put | None]], dict[str, Seen]]:
        """What a commit would send, and what the view holds."""
        base, seen = state["base"], view.look(self._root)
        writing = {file.path for file in self.open_files() if file.writing}
        state["writing"] = sorted(writing)
        changes: list[tuple[str, Put | None]] = []
        for path, now in seen.items():
            if base.get(path, [0])[1:] == view.identity(now):
                continue
            if path in writing and self._modes.open_write == "hide":
                continue
            if now.links > 1 and self._modes.version == 1:
                raise InvalidPath(f"{path!r} is a hard link, which version 1 of a volume has not")
            changes.append((path, Put(now.kind, view.read(self._root, path, now))))
        changes.extend((path, None) for path in base if path not in seen)
        changes.sort(key=lambda change: change[0])
        if self._modes.commit_order == "shuffled":
            self._random.shuffle(changes)
        return changes, seen

    def _push(self, state: Table, *, stop_after: int | None) -> None:
        """Send the changes, at once or path by path; what was sent stays noted as changed until `_settle`."""
        changes, _ = self._changes(state)
        state["pushed"] = [path for path, _ in changes]
        if self._modes.commit_atomic:
            if stop_after is not None:
                raise EmulatedFault("commit: no answer")
            if changes:
                self.server.apply(changes, author=self.task_id)
            return
        for number, change in enumerate(changes):
            if number == stop_after:
                raise EmulatedFault("the commit stopped half-way")
            self.server.apply([change], author=self.task_id)
        if stop_after is not None and stop_after >= len(changes):
            raise EmulatedFault("commit: no answer")

    def _settle(self, state: Table) -> None:
        """What was sent is no longer a change, unless it is still being written."""
        base, writing = state["base"], set(state["writing"])
        for path in state["pushed"]:
            noted = None if path in writing else view.note(self._root, path)
            if noted is not None:
                base[path] = ["", *noted]
            elif path not in writing:
                base.pop(path, None)

    def _reload(self, state: Table) -> None:
        if held := self.open_files():
            first = held[0]
            what = "cwd of" if first.is_cwd else "open in"
            raise VolumeBusy(
                f"there are open files preventing the operation: {first.path or '.'} is {what} process "
                f"{first.process} ({first.command}), and {len(held) - 1} more"
            )
        changes, _ = self._changes(state)
        if changes and self._modes.reload_dirty == "commit":
            self.server.apply(changes, author=self.task_id)
        if self._modes.reload_window_s:
            aside = f"{self._root}.aside"
            os.rename(self._root, aside)
            os.mkdir(self._root)
            time.sleep(self._modes.reload_window_s)
            shutil.rmtree(self._root)
            os.rename(aside, self._root)
        self._fetch(state)

    def _fetch(self, state: Table) -> None:
        """Make the view equal to the committed state."""
        committed, base, seen = self.server.snapshot(), state["base"], view.look(self._root)
        for path in seen.keys() - committed.keys():
            view.remove(self._root, path)
        fresh: Table = {}
        for path, (token, kind) in committed.items():
            known = base.get(path)
            same = known and path in seen and known == [token, *view.identity(seen[path])]
            if not same:
                view.write(self._root, path, kind, self.server.blob(token))
                known = [token, *(view.note(self._root, path) or [])]
            fresh[path] = known
        state["base"] = fresh
        view.prune(self._root)
