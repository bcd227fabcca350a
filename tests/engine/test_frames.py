"""Frames: what goes in comes out, and nothing else can."""

import contextlib
import dataclasses
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from lilo_engine.commands import frames
from lilo_engine.commands.command import Batch, Output, WorkItem
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import ModelId, OptimStep, Refused
from lilo_engine.operations.tensor import Tensor

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=64)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)


def a_batch() -> Batch:
    datum = Datum(
        tokens=Tensor.of([1, 2, 3], "int32"),
        loss_inputs={
            "target_tokens": Tensor.of([2, 3, 4], "int64"),
            "weights": Tensor.of([0.5, -1.0, 0.0], "float32"),
        },
    )
    item = WorkItem(operation_id="m:1", model_id=ModelId("m"), datums=(datum, datum))
    return Batch(loss="ppo", config={"clip_low_threshold": 0.8}, forward_only=False, items=(item,))


@given(values)
def test_any_plain_value_comes_back_equal(value):
    assert frames.decode(frames.encode(value)) == value


def test_a_batch_comes_back_equal_and_its_buffers_are_bytes():
    back = frames.decode(frames.encode(a_batch()))
    assert back == a_batch()
    assert type(back.items[0].datums[0].tokens.data) is bytes


@pytest.mark.parametrize("shape", [(1, 3000), (100, 30), (30, 100)], ids=str)
def test_a_batch_of_thousands_of_datums_comes_back_equal(shape):
    num_items, num_datums = shape
    one = a_batch()
    datums = tuple(
        dataclasses.replace(one.items[0].datums[0], tokens=Tensor.of([n], "int32"))
        for n in range(num_datums)
    )
    items = tuple(
        WorkItem(operation_id=f"m:{n}", model_id=ModelId("m"), datums=datums)
        for n in range(num_items)
    )
    batch = dataclasses.replace(one, items=items)
    assert frames.decode(frames.encode(batch)) == batch


def test_numbers_that_are_not_finite_travel():
    back = frames.decode(frames.encode(Output(operation_id="m:1", metrics={"loss:sum": math.inf})))
    assert back.metrics == {"loss:sum": math.inf}
    assert math.isnan(frames.decode(frames.encode(math.nan)))


@pytest.mark.parametrize("error", [InvalidRequest("rank 0"), CommandFailed("no memory")])
def test_an_error_travels_as_its_kind_and_message(error):
    refused = Refused(model_id=ModelId("m"), seq_id=1, verb="optim_step", error=error)
    assert frames.decode(frames.encode(refused)) == refused


def test_a_class_that_is_not_registered_cannot_travel():
    @dataclasses.dataclass(frozen=True)
    class Stranger:
        x: int

    with pytest.raises(frames.FrameError):
        frames.encode(Stranger(1))


def test_two_classes_of_one_name_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Batch:
        x: int

    with pytest.raises(frames.FrameError):
        frames.register(Batch)


def test_a_class_that_can_change_is_refused():
    @dataclasses.dataclass
    class Loose:
        x: int

    with pytest.raises(frames.FrameError):
        frames.register(Loose)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_frame_is_an_error_or_another_value_never_a_crash(place, byte):
    frame = bytearray(frames.encode(a_batch()))
    frame[place % len(frame)] = byte
    with contextlib.suppress(frames.FrameError):
        frames.decode(frame)


@pytest.mark.parametrize("keep", [0, 3, 8, 40, -1])
def test_a_cut_frame_is_an_error(keep):
    with pytest.raises(frames.FrameError):
        frames.decode(frames.encode(a_batch())[:keep])


def test_a_mapping_with_other_keys_than_text_is_refused():
    with pytest.raises(frames.FrameError):
        frames.encode({1: 2})


def test_operations_are_registered():
    from lilo_engine.operations.operation import AdamParams

    params = AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )
    step = OptimStep(model_id=ModelId("m"), seq_id=2, params=params)
    assert frames.decode(frames.encode(step)) == step
