"""B35: half a checkpoint looks whole. Four ranks on two nodes with a view each of one volume, the same host name on both.

Every test here runs one scenario twice: as it is built, and with the fix that it is about switched off, where the
same assertions must fail.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lilo_engine.commands.command import Published
from lilo_engine.errors import CommandFailed
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.adapter_state import assemble
from lilo_miles_backend.checkpoints import load_training, persist_sampler, persist_training
from lilo_miles_backend.checkpoints.capture_files import CaptureFiles
from lilo_miles_backend.ranks.view_guard import ViewGuard
from lilo_miles_backend.sampler.adapters import read_adapter
from lilo_miles_backend.sampler.weights import read_base
from lilo_volume import Attempt, Entry, LocalVolume, SoloGroup, VolumeBusy, catalogue
from lilo_volume.publish import Publisher
from lilo_volume.testing import run_ranks
from lilo_volume.testing.emulator import EmulatedVolume, Emulator, Modes
from safetensors.torch import load_file

from tests.miles_backend.checkpoints.conftest import (
    assert_equal_states,
    destination,
    make_state,
    part_of,
    placed,
)

WORLD = 4
RUN = "0ab:train:0"
MODES = [Modes(), Modes(commit_reload="on"), Modes(commit_atomic=False, background="adversarial")]


class TwoNodes:
    """Ranks 0 and 1 on one node, 2 and 3 on another."""

    def __init__(self, folder: Path, modes: Modes) -> None:
        self.emulator = Emulator(folder, modes=modes)
        self.containers = [self.emulator.mount("a"), self.emulator.mount("b")]
        self.volumes = [self.emulator.volume(container) for container in self.containers]
        self.state = make_state(layers=1, lora_rank=4, unembed=False)

    def node(self, rank: int) -> str:
        return self.containers[rank // 2].task_id

    def save(
        self,
        name: str = "one",
        *,
        node: Callable[[int], str] | None = None,
        volume: Callable[[int], object] | None = None,
    ) -> list[Published | BaseException]:
        def persist(group):
            return persist_training(
                volume(group.rank) if volume else self.volumes[group.rank // 2],
                group,
                part_of(self.state, group.rank, WORLD),
                destination(name=name, overwrite=True),
                layout={"tp": WORLD, "cp": 1, "dp": 1},
                node=(node or self.node)(group.rank),
            )

        return run_ranks(WORLD, persist)

    def assert_whole(self, outcomes: list[Published | BaseException], name: str = "one") -> None:
        """Published, and loaded by new ranks."""
        assert all(isinstance(outcome, Published) for outcome in outcomes), outcomes
        self.assert_loads(name)

    def assert_loads(self, name: str) -> None:
        """Bit for bit, by ranks on nodes that have never seen it."""
        fresh = [self.emulator.mount("c"), self.emulator.mount("d")]
        ref = CheckpointRef(run_id=RUN, kind="weights", name=name)

        def load(group):
            return load_training(
                self.emulator.volume(fresh[group.rank // 2]),
                ref,
                group=group,
                place=placed(group.rank, WORLD),
                node=fresh[group.rank // 2].task_id,
            )

        parts = run_ranks(WORLD, load)
        assert not [part for part in parts if isinstance(part, BaseException)], parts
        assert_equal_states(self.state, assemble(parts))


def held_below(root: Path) -> list[str]:
    """What this process holds open or has mapped below a folder; either refuses a reload."""
    open_files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            open_files.append(str(descriptor.readlink()))
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [path for path in (*open_files, *mapped) if path.startswith(f"{root}/")]


@pytest.fixture(params=MODES, ids=["kind", "commit reloads", "background commits"])
def nodes(request, tmp_path) -> TwoNodes:
    return TwoNodes(tmp_path, request.param)


def fails(scenario: Callable[[], None]) -> None:
    """The scenario's own assertions must not hold."""
    with pytest.raises(AssertionError):
        scenario()


def test_b35_one_rank_of_each_node_commits_although_both_have_one_host_name(nodes):
    assert len({socket.gethostname() for _ in nodes.containers}) == 1
    nodes.assert_whole(nodes.save())
    shards = {e.path for e in catalogue(nodes.volumes[0])[0].manifest.files}
    assert {f"__{rank}_0.distcp" for rank in range(WORLD)} < shards

    fails(
        lambda: nodes.assert_whole(nodes.save("two", node=lambda rank: socket.gethostname()), "two")
    )


class ViewIsTruth(EmulatedVolume):
    """As if what one container sees were what everybody has: what a rename by rank 0 acts on."""

    def __init__(self, volume: EmulatedVolume) -> None:
        self.__dict__.update(volume.__dict__)

    def list_committed(self, prefix: str) -> list[Entry]:
        found = sorted(path for path in self.local_path(prefix).rglob("*") if path.is_file())
        return [
            Entry(path=str(path.relative_to(self.root)), size_bytes=path.stat().st_size)
            for path in found
        ]


def test_b35_what_counts_is_the_committed_state_and_not_what_rank_zero_sees(nodes):
    nodes.assert_whole(nodes.save())
    seen = {path.name for path in nodes.volumes[0].root.rglob("*.distcp")}
    if nodes.emulator.modes.commit_reload == "off":
        assert seen == {"__0_0.distcp", "__1_0.distcp"}, "writers never reload, and need not"

    local = [ViewIsTruth(volume) for volume in nodes.volumes]
    fails(
        lambda: nodes.assert_whole(nodes.save("two", volume=lambda rank: local[rank // 2]), "two")
    )


def test_b35_a_snapshot_can_be_read_by_its_writer_at_once(nodes):
    published = persist_sampler(
        nodes.volumes[0], SoloGroup(), nodes.state, destination("sampler_weights")
    )

    def readable(folder: str) -> None:
        tensors = Path(folder) / "adapter_model.safetensors"
        assert tensors.is_file()
        assert len(load_file(tensors)) == len(nodes.state.weights)

    readable(published.folder)
    # On the other node it is committed, and not in the view: what a server-side copy would be for its own writer.
    relative = Path(published.folder).relative_to(nodes.volumes[0].root)
    fails(lambda: readable(str(nodes.volumes[1].root / relative)))


def test_b35_an_open_capture_file_stops_no_save(nodes, monkeypatch):
    capture = nodes.volumes[1].root / ".captures" / "open"
    capture.parent.mkdir()
    capture.write_bytes(b"a capture of the engine on this node")
    with capture.open("rb"):
        nodes.assert_whole(nodes.save())
        with pytest.raises(VolumeBusy):
            nodes.volumes[1].reload()

        publish = Attempt.publish

        def reload_before(self, **options):
            for volume in nodes.volumes:
                if volume.root == self.folder.parents[3]:
                    volume.reload()
            return publish(self, **options)

        monkeypatch.setattr(Attempt, "publish", reload_before)
        fails(lambda: nodes.assert_whole(nodes.save("two"), "two"))


def test_b35_nothing_that_was_loaded_or_captured_holds_a_file_of_the_volume(nodes, tiny_folder):
    volume, root = nodes.volumes[0], nodes.volumes[0].root
    nodes.save()
    snapshot = persist_sampler(volume, SoloGroup(), nodes.state, destination("sampler_weights"))
    ref = CheckpointRef(run_id=RUN, kind="weights", name="one")
    loaded = load_training(volume, ref)
    files = CaptureFiles(volume)
    files.put("c", nodes.state.weights)
    captured = files.take("c")
    base = read_base(tiny_folder, dtype=torch.float32, device=torch.device("cpu"))
    adapter = read_adapter("a", snapshot.folder, base)
    held = [loaded, captured, adapter]
    assert held_below(root) == [], held

    mapped = load_file(Path(snapshot.folder) / "adapter_model.safetensors")
    assert len(held_below(root)) == 1 == len({len(mapped)}), "a mapped file does show"


def test_b35_a_load_takes_nothing_from_a_publication_that_is_under_way(tmp_path, monkeypatch):
    nodes = TwoNodes(tmp_path, Modes(reload_dirty="drop"))
    nodes.save()
    ref = CheckpointRef(run_id=RUN, kind="weights", name="one")
    written, go_on = threading.Event(), threading.Event()
    publish = Attempt.publish

    def pause(self, **options):
        written.set()
        assert go_on.wait(20)
        return publish(self, **options)

    monkeypatch.setattr(Attempt, "publish", pause)

    def scenario(guard: ViewGuard, name: str, *, load_first: bool) -> None:
        """A snapshot is written; before it is committed, somebody loads on the same node."""
        written.clear()
        go_on.clear()

        def write() -> Published:
            with guard.writing():
                target = destination("sampler_weights", name)
                return persist_sampler(nodes.volumes[0], SoloGroup(), nodes.state, target)

        def load() -> None:
            with guard.loading():
                load_training(nodes.volumes[0], ref)

        with ThreadPoolExecutor(2) as threads:
            publishing = threads.submit(write)
            assert written.wait(20)
            loading = threads.submit(load)
            if load_first:
                loading.result(20)
            go_on.set()
            loading.result(20)
            error = publishing.exception(20)
            assert error is None, error

    scenario(ViewGuard(20.0), "guarded", load_first=False)
    unguarded = ViewGuard(20.0)
    monkeypatch.setattr(unguarded, "writing", nullcontext)
    fails(lambda: scenario(unguarded, "unguarded", load_first=True))


def test_whoever_waits_too_long_for_a_view_is_told_what_for():
    guard = ViewGuard(0.01)
    with guard.writing():
        with pytest.raises(CommandFailed, match="publications"), guard.loading():
            pass
        with guard.writing():
            pass
    with guard.loading(), pytest.raises(CommandFailed, match="loaded"), guard.writing():
        pass
    with guard.writing():
        pass


def test_b35_a_save_short_of_one_shard_is_refused_by_name_and_the_previous_stays(
    nodes, monkeypatch
):
    nodes.assert_whole(nodes.save())
    publish = Attempt.publish

    def lose(self, **options):
        (self.folder / "__3_0.distcp").unlink(missing_ok=True)
        return publish(self, **options)

    monkeypatch.setattr(Attempt, "publish", lose)

    def refused_by_name(name: str) -> None:
        outcomes = nodes.save(name)
        assert [type(outcome) for outcome in outcomes] == [CommandFailed] * WORLD
        assert all("__3_0.distcp" in str(outcome) for outcome in outcomes)

    refused_by_name("one")
    nodes.assert_loads("one")

    monkeypatch.setattr(Publisher, "_not_committed", lambda self, files: set())
    fails(lambda: refused_by_name("two"))


def test_b35_a_node_without_the_volume_is_refused_on_all_ranks(nodes, tmp_path):
    stray = LocalVolume(tmp_path / "stray")

    def refused(volume: Callable[[int], object]) -> None:
        outcomes = nodes.save(volume=volume)
        assert [type(outcome) for outcome in outcomes] == [CommandFailed] * WORLD
        assert all("another volume" in str(outcome) for outcome in outcomes)

    refused(lambda rank: nodes.volumes[0] if rank < 2 else stray)
    assert catalogue(nodes.volumes[0]) == []
    fails(lambda: refused(lambda rank: nodes.volumes[rank // 2]))
