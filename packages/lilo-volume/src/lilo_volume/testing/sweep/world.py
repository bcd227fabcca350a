"""World: two nodes of two ranks on an emulated volume, with an old checkpoint; runs one case and checks it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lilo_volume.faults import Faults, Stopped
from lilo_volume.gc import collect_garbage
from lilo_volume.manifest import MANIFEST_NAME, Manifest, parse
from lilo_volume.retention import Retention
from lilo_volume.testing.emulator.container import Container
from lilo_volume.testing.emulator.emulator import Emulator
from lilo_volume.testing.emulator.modes import Modes
from lilo_volume.testing.emulator.server import Put
from lilo_volume.testing.sweep.case import NODES, WORLD_SIZE, Case, Setting
from lilo_volume.testing.sweep.invariants import (
    again_faults,
    agreement_faults,
    committed_faults,
    read_back_faults,
    reader_faults,
)
from lilo_volume.testing.sweep.protocols import Save, Saving, content
from lilo_volume.testing.threads import ThreadGroup, thread_groups

OLD, NEW = "old", "new"
_OLD_NAME, _NEW_NAME = "10", "20"
_LIMIT_S = 30.0
"""For a rank to end: its deadline, and slack for a busy machine."""
_KEEP_ONE = Retention(keep_last=1, reader_guard_s=0.0, attempt_guard_s=0.0)


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold."""

    invariant: str
    what: str
    case: str


class World:
    """One emulated volume with its containers."""

    def __init__(
        self, saving: Saving, setting: Setting, folder: Path, old: dict[str, bytes]
    ) -> None:
        """Start both nodes on a volume that holds `old`, as `old_checkpoint` made it."""
        self.emulator = Emulator(folder, modes=setting.modes)
        self.emulator.server.apply([(p, Put("f", d)) for p, d in old.items()], author="")
        self.setting = setting
        self._saving = saving
        self._containers: dict[str, Container] = {}
        self._open: list[IO[bytes]] = []
        self.struck = False
        self.looked: object = None
        """What the last look saw."""
        self.start()

    @property
    def name(self) -> str:
        """Under which name the new checkpoint is saved."""
        return _OLD_NAME if self.setting.same_name else _NEW_NAME

    def start(self) -> None:
        """Mount both nodes, with a reader in rank 0's container if the setting has one."""
        for node in dict.fromkeys(NODES):
            self._containers[node] = self.emulator.mount(node)
        if self.setting.open_reader:
            root = self._containers[NODES[0]].root
            place = next(path for path in root.rglob("__0_0.distcp"))
            self._open.append(place.open("rb"))

    def end(self) -> None:
        """End both nodes as the setting has it, and start new ones."""
        self.close()
        for container in self._containers.values():
            container.crash() if self.setting.ending == "crash" else container.exit()
        self.start()

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.pop().close()

    def save(self, case: Case | None) -> list[object]:
        """Run all ranks; what each returned or raised, None for one that did not end in time."""
        outcomes: list[object] = [None] * WORLD_SIZE
        all_faults = [Faults(*(case.faults(r) if case else ())) for r in range(WORLD_SIZE)]
        groups = thread_groups(WORLD_SIZE, nodes=NODES)
        threads = [
            threading.Thread(target=self._rank, args=(g, f, outcomes, case is None), daemon=True)
            for g, f in zip(groups, all_faults, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=_LIMIT_S)
        self.struck = case is not None and case.step in all_faults[case.rank].struck
        self.seen = {rank: faults.seen for rank, faults in enumerate(all_faults)}
        return outcomes

    def _rank(
        self, group: ThreadGroup, faults: Faults, outcomes: list[object], again: bool
    ) -> None:
        save = Save(
            volume=self.emulator.volume(self._containers[NODES[group.rank]]),
            group=group,
            faults=faults,
            name=self.name,
            order=int(_NEW_NAME),
            text=NEW,
            overwrite=self.setting.same_name,
            retry=again and not self.setting.same_name,
        )
        try:
            outcomes[group.rank] = self._saving(save)
        except Stopped as stopped:
            outcomes[group.rank] = stopped
        except Exception as error:
            outcomes[group.rank] = error
        if isinstance(outcomes[group.rank], BaseException):
            group.close()

    def published(self) -> Manifest | None:
        """The manifest of the new checkpoint, if it is in the committed state."""
        for entry in self.emulator.server.list():
            if entry.path.endswith(f"/{MANIFEST_NAME}"):
                manifest = parse(self.emulator.server.read(entry.path))
                if manifest.metadata["text"] == NEW:
                    return manifest
        return None

    def background(self) -> None:
        """Commits happen on their own sooner or later."""
        for container in self._containers.values():
            container.commit_in_background()

    def reloads(self) -> int:
        """How often writers asked for a reload."""
        return sum(container.calls["reload"] for container in self._containers.values())


def old_checkpoint(saving: Saving) -> dict[str, bytes]:
    """The committed files of an old checkpoint, as `saving` publishes it when nothing fails."""
    setting = Setting(modes=Modes(), ending="stay", same_name=True, open_reader=False, times=None)
    with temporary_folder() as folder:
        world = World(lambda save: saving(_as_old(save)), setting, folder, {})
        world.save(None)
        world.background()
        server = world.emulator.server
        return {entry.path: server.read(entry.path) for entry in server.list()}


def _as_old(save: Save) -> Save:
    return Save(
        volume=save.volume,
        group=save.group,
        faults=save.faults,
        name=_OLD_NAME,
        order=int(_OLD_NAME),
        text=OLD,
        overwrite=False,
        retry=False,
    )


def run_case(saving: Saving, case: Case, old: dict[str, bytes]) -> list[Violation]:
    """Save with the fault, look, end the containers, look, save again, look, collect, look."""
    with temporary_folder() as folder:
        world = World(saving, case.setting, folder, old)
        try:
            return [Violation(i, what, str(case)) for i, what in _checked(world, case)]
        finally:
            world.close()


def _checked(world: World, case: Case) -> Iterator[tuple[str, str]]:
    explicit = case.setting.same_name
    outcomes = world.save(case)
    cause = 0 if case.refused_before else case.rank
    yield from agreement_faults(outcomes, cause, struck=world.struck)
    yield from _looked(world, (OLD, NEW), explicit=explicit)
    reloads = world.reloads()
    if case.setting.ending != "stay":
        world.end()
        yield from _looked(world, (OLD, NEW), explicit=explicit)
    before = None if explicit else world.published()
    outcomes = world.save(None)
    yield from again_faults(outcomes, before)
    yield from read_back_faults(outcomes[0], NEW)
    yield from _looked(world, (NEW,), explicit=explicit)
    if reloads + world.reloads():
        yield "I7", f"writers reloaded {reloads + world.reloads()} times"
    yield from _collected(world, case)


def _looked(world: World, texts: tuple[str, ...], *, explicit: bool) -> Iterator[tuple[str, str]]:
    state = world.emulator.server.snapshot(), texts
    if state == world.looked:
        return  # nothing has changed since
    world.looked = state
    yield from committed_faults(world.emulator)
    yield from reader_faults(world.emulator.outside(), world.name, texts, explicit=explicit)


def _collected(world: World, case: Case) -> Iterator[tuple[str, str]]:
    """I6 and I9: retention that keeps one, on everything that faults left behind."""
    world.background()
    paths = [entry.path for entry in world.emulator.server.list()]
    attempts = {"/".join(path.split("/")[:4]) for path in paths}
    most = len(content("")) + 3  # beside the files: manifest, note, and the stray file
    if len(attempts) == sum(path.endswith(MANIFEST_NAME) for path in paths) and len(
        paths
    ) <= most * len(attempts):
        return  # nothing was left behind, so there is nothing to collect
    keeper = world.emulator.volume(world.emulator.mount("keeper", modes=Modes()))
    collect_garbage(keeper, _KEEP_ONE)
    found = reader_faults(keeper, world.name, (NEW,), explicit=False, level="full")
    yield from (("I6", what) for _, what in found)
    entries = [entry.path for entry in world.emulator.server.list()]
    # What the medium refused to remove each time may stay.
    twice = case.step == "remove source" and case.setting.times is None
    if len(entries) > most + twice * (len(content("")) + 1):
        yield "I9", f"{len(entries)} files are left: {entries}"


@contextlib.contextmanager
def temporary_folder() -> Generator[Path]:
    """A folder of its own, in memory where that is possible: nothing has to last."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="lilo-sweep-", dir=memory if memory.is_dir() else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
