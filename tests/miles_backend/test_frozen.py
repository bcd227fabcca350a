"""Freezing tensors for publication: what a GPU does, with the same staging on the CPU's memory."""

import dataclasses
import math
from itertools import product

import pytest
import torch
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.adapter_state import PARTS, flat_tensors
from lilo_miles_backend.checkpoints import load_training
from lilo_miles_backend.checkpoints.capture_files import CaptureFiles
from lilo_miles_backend.ranks.captures import Captures
from lilo_miles_backend.ranks.collectives import ALONE
from lilo_miles_backend.ranks.frozen import Freezer
from lilo_miles_backend.ranks.gather import whole_tensors
from lilo_miles_backend.ranks.side_stream import SideStream
from lilo_miles_backend.ranks.staging import Staging
from lilo_volume import LocalVolume, SoloGroup

from tests.miles_backend.checkpoints.conftest import assert_equal_states, destination, make_state
from tests.miles_backend.late_copies import LateSideStream

CPU = torch.device("cpu")
CHUNK = 64


def staging() -> Staging:
    return Staging(SideStream(CPU), chunk_bytes=CHUNK)


def test_what_comes_through_the_buffers_is_whole_whatever_its_length_and_type():
    way = staging()
    for count, dtype in product((0, 1, 15, 16, 17, 32, 33, 200), (torch.float32, torch.bfloat16)):
        flat = torch.randn(count).to(dtype)
        assert torch.equal(way.bring(flat, way.mark()), flat), (count, dtype)


@pytest.mark.parametrize("room", [0.0, math.inf])
def test_what_is_frozen_stays_as_it_was_with_room_on_the_device_and_without(room):
    named = {"a": torch.randn(7, 5), "b": torch.randn(3, 11).t(), "none": torch.empty(0, 4)}
    before = {name: tensor.clone() for name, tensor in named.items()}
    frozen = Freezer(staging(), lambda: room).freeze(named)
    for tensor in named.values():
        tensor.zero_()
    found = frozen.on_host()
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor), name


def test_the_device_is_used_only_where_twice_the_copy_is_free():
    asked: list[str] = []

    class Watched(Staging):
        def bring(self, flat, ready):
            asked.append("brought")
            return super().bring(flat, ready)

    tensor = torch.randn(100)
    for room, brought_at_once in ((799.0, 1), (800.0, 0)):
        asked.clear()
        frozen = Freezer(
            Watched(SideStream(CPU), chunk_bytes=CHUNK), lambda room=room: room
        ).freeze({"a": tensor})
        assert len(asked) == brought_at_once
        assert torch.equal(frozen.on_host()["a"], tensor)


def test_what_was_gathered_stays_on_the_device_only_where_twice_as_much_was_free():
    for room, brought_at_once in ((399.0, True), (400.0, False)):
        tensor = torch.randn(25, 4)  # 400 bytes, which are not free any more
        before, later = tensor.clone(), torch.zeros_like(tensor)
        freezer = Freezer(staging(), lambda room=room: room)
        frozen = freezer.keep(tensor, "a")
        tensor.zero_()
        assert torch.equal(frozen.on_host()["a"], before if brought_at_once else later)


def test_a_rank_without_a_share_freezes_nothing():
    assert Freezer(staging(), lambda: 0.0).freeze({}).on_host() == {}


@pytest.mark.parametrize("way", [None, staging()])
def test_the_whole_adapter_of_one_rank_is_what_it_holds(way):
    state = make_state(layers=1)
    frozen = whole_tensors(state.weights, {}, ALONE, Freezer(way, lambda: math.inf))
    assert frozen is not None
    found = frozen.on_host()
    assert list(found) == list(state.weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.weights.items())


@pytest.mark.parametrize("where", ["memory", "volume"])
def test_a_capture_that_waits_on_the_device_is_published_as_it_was(tmp_path, where):
    volume = LocalVolume(tmp_path)
    files = CaptureFiles(volume) if where == "volume" else None
    captures = Captures(volume, SoloGroup(), layout={"tp": 1, "cp": 1, "dp": 1}, files=files)
    state, training = make_state(layers=1), make_state(layers=1)
    frozen = Freezer(staging(), lambda: math.inf).freeze(flat_tensors(training))
    emptied = dataclasses.replace(training, **{part: {} for part in PARTS})
    captures.keep("c1", "training", emptied, frozen)
    for tensor in flat_tensors(training).values():
        tensor.fill_(3.0)
    captures.persist("c1", destination())
    reference = CheckpointRef(run_id="0ab:train:0", kind="weights", name="one")
    assert_equal_states(state, load_training(volume, reference))
    captures.close()


@pytest.mark.parametrize("count", [1, 16, 40, 200])
def test_copies_that_are_as_late_as_they_may_be_bring_what_was_frozen(count):
    side = LateSideStream()
    freezer = Freezer(Staging(side, chunk_bytes=CHUNK), lambda: math.inf)
    tensor = torch.randn(count)
    before = tensor.clone()
    frozen = freezer.freeze({"a": tensor})
    tensor.zero_()
    assert torch.equal(frozen.on_host()["a"], before)
    assert side.late
