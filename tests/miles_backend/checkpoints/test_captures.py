"""Captures between freezing and publication: in memory or on the volume, taken once, never left behind."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from lilo_engine.errors import CommandFailed, NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.adapter_state import PARTS, flat_tensors
from lilo_miles_backend.checkpoints import load_training
from lilo_miles_backend.checkpoints.capture_files import (
    CAPTURES,
    ORPHAN_AGE_S,
    CaptureFiles,
    sweep,
)
from lilo_miles_backend.ranks.captures import Captures
from lilo_miles_backend.ranks.frozen import Frozen
from lilo_volume import SoloGroup
from lilo_volume.testing import run_ranks
from lilo_volume.testing.emulator import Emulator, Modes

from tests.miles_backend.checkpoints.conftest import (
    assert_equal_states,
    destination,
    make_state,
    part_of,
)

REF = CheckpointRef(run_id="0ab:train:0", kind="weights", name="one")
LAYOUT = {"tp": 1, "cp": 1, "dp": 1}
OWNER = """
import sys
from pathlib import Path
import torch
from lilo_miles_backend.checkpoints.capture_files import CaptureFiles
from lilo_volume import LocalVolume

CaptureFiles(LocalVolume(Path(sys.argv[1]))).put("left", {"a": torch.ones(3)})
print("captured", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def state():
    return make_state(layers=1)


def keep(captures, capture_id, kind, state):
    tensors = flat_tensors(state)
    emptied = dataclasses.replace(state, **{part: {} for part in PARTS})
    captures.keep(capture_id, kind, emptied, Frozen(lambda: tensors))


def waiting(volume):
    return sorted(volume.root.glob(f"{CAPTURES}/*/*.safetensors"))


@pytest.mark.parametrize("where", ["memory", "volume"])
def test_a_capture_is_published_as_it_was_frozen_and_taken_once(volume, state, where):
    files = CaptureFiles(volume) if where == "volume" else None
    captures = Captures(volume, SoloGroup(), layout=LAYOUT, files=files)
    keep(captures, "c1", "training", state)
    assert len(waiting(volume)) == (where == "volume")
    captures.persist("c1", destination())
    assert_equal_states(state, load_training(volume, REF))
    with pytest.raises(NotFound):
        captures.persist("c1", destination(name="again"))
    assert waiting(volume) == []
    keep(captures, "c2", "sampler", dataclasses.replace(state, exp_avg={}, exp_avg_sq={}))
    captures.persist("c2", destination("sampler_weights"))
    keep(captures, "c3", "training", state)
    captures.close()
    assert list(volume.root.glob(f"{CAPTURES}/*")) == []


def test_a_refused_publication_lets_go_of_its_capture_too(volume, state):
    captures = Captures(volume, SoloGroup(), layout=LAYOUT, files=CaptureFiles(volume))
    keep(captures, "c1", "training", dataclasses.replace(state, exp_avg={}))
    with pytest.raises(CommandFailed):
        captures.persist("c1", destination())
    assert waiting(volume) == []


def test_a_capture_that_one_rank_lost_fails_on_all_and_none_waits(volume, state):
    def act(group):
        captures = Captures(volume, group, layout={"tp": 2}, files=None)
        if group.rank == 0:
            keep(captures, "c1", "training", part_of(state, 0, 2))
        return captures.persist("c1", destination())

    outcomes = run_ranks(2, act)
    assert [type(outcome) for outcome in outcomes] == [NotFound] * 2
    assert volume.list_committed("") == []


def test_a_capture_that_finds_no_room_fails_and_leaves_nothing(volume, state, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    captures = Captures(volume, SoloGroup(), layout=LAYOUT, files=CaptureFiles(volume))
    monkeypatch.setattr("lilo_miles_backend.checkpoints.capture_files.save_file", full)
    with pytest.raises(CommandFailed, match="No space left"):
        keep(captures, "c1", "training", state)
    assert waiting(volume) == []


def test_captures_never_look_like_checkpoints_and_are_removed_from_the_committed_state(
    tmp_path, state
):
    emulator = Emulator(tmp_path)
    container = emulator.mount("a")
    volume = emulator.volume(container)
    captures = Captures(volume, SoloGroup(), layout=LAYOUT, files=CaptureFiles(volume))
    keep(captures, "c1", "training", state)
    keep(captures, "c2", "training", state)
    assert volume.list_committed(CAPTURES) == []
    container.commit_in_background()
    assert [entry.path.rpartition("/")[2] for entry in volume.list_committed(CAPTURES)] == [
        "OWNER",
        "c1.safetensors",
        "c2.safetensors",
    ]
    captures.persist("c1", destination())
    # By their names alone: the folder's is drawn, and may hold any letters and digits.
    left = [entry.path.rpartition("/")[2] for entry in volume.list_committed(CAPTURES)]
    assert left == ["OWNER", "c2.safetensors"]
    captures.close()
    assert volume.list_committed(CAPTURES) == []
    assert_equal_states(state, load_training(emulator.volume(emulator.mount("b")), REF))


def test_a_capture_that_waits_survives_that_its_view_is_brought_up_to_date(tmp_path, state):
    emulator = Emulator(tmp_path, modes=Modes(reload_dirty="drop"))
    volume = emulator.volume(emulator.mount("a"))
    files = CaptureFiles(volume)
    files.put("settled", state.weights)
    files.settle()
    files.put("not settled", state.weights)
    volume.reload()
    assert files.take("settled").keys() == state.weights.keys()
    with pytest.raises(OSError, match="not settled"):
        files.take("not settled")
    files.close()
    volume.reload()
    files.put("later", state.weights)
    assert files.take("later").keys() == state.weights.keys()


def test_what_a_killed_trainer_captured_is_swept_at_once_and_what_a_living_one_has_stays(volume):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(volume.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "captured\n"
        mine = CaptureFiles(volume)
        mine.put("mine", {"a": torch.ones(2)})
        assert sweep(volume, committed=True) == []
        owner.kill()
    (swept,) = sweep(volume, committed=True)
    assert not volume.local_path(swept).exists()
    assert [path.stem for path in waiting(volume)] == ["mine"]


def test_what_another_machine_left_is_swept_by_age_from_view_and_committed_state(tmp_path):
    emulator = Emulator(tmp_path)
    gone, here = emulator.mount("gone"), emulator.mount("here")
    other = emulator.volume(gone)
    CaptureFiles(other).put("left", {"a": torch.ones(3)})
    place = next(gone.root.glob(f"{CAPTURES}/*/OWNER"))
    place.write_text("another-machine/pid:[1] 17 12345", encoding="utf-8")
    other.commit()
    began_ms = int(place.parent.name.partition("-")[0])
    volume = emulator.volume(here)
    volume.reload()
    later = began_ms + int(ORPHAN_AGE_S * 1000)
    assert sweep(volume, committed=True, now_ms=later - 1) == []
    assert sweep(volume, committed=False, now_ms=later + 1_000) != []
    assert volume.list_committed(CAPTURES) != []
    assert sweep(volume, committed=True, now_ms=later + 1_000) != []
    assert volume.list_committed(CAPTURES) == []
