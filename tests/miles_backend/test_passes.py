"""Passes of a backend: windows, items beside each other, what a pass says, and what fails alone."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from lilo_definitions import Definition, architecture_of
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.tensor import Tensor
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref


def test_passes_accumulate_and_forward_leaves_gradients_alone(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(2)
    first, second = ref.ragged((5, 3), rng, vocab=97), ref.ragged((7,), rng, vocab=97)
    one = ref.item(model_id, first)
    ref.run(tied_backend, one)
    alone = ref.gradients_of(tied_backend, model_id)
    (forward,) = ref.run(tied_backend, ref.item(model_id, second), forward_only=True)
    unchanged = ref.gradients_of(tied_backend, model_id)
    assert all(torch.equal(alone[name], unchanged[name]) for name in alone)

    (backward,) = ref.run(tied_backend, ref.item(model_id, second))

    assert ref.numbers(forward) == ref.numbers(backward)
    both = ref.gradients_of(tied_backend, model_id)
    tied_backend.drop_gradients(model_id)
    ref.run(tied_backend, ref.item(model_id, second))
    other = ref.gradients_of(tied_backend, model_id)
    assert ref.worst(both, {name: alone[name] + other[name] for name in alone}) <= 1e-5


def test_forward_alone_gives_no_gradients_to_step_with(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    one = ref.datum(5, np.random.default_rng(3), vocab=97)
    ref.run(tied_backend, ref.item(model_id, [one]), forward_only=True)
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)


def test_items_batched_together_are_bit_for_bit_those_run_alone(
    tied_backend: MilesBackend, model_id: str
) -> None:
    rng = np.random.default_rng(4)
    names = [f"{model_id}-{key}" for key in "abc"]
    data = [ref.ragged(lengths, rng, vocab=97) for lengths in ((1, 2, 17, 128), (17,), (3, 60))]
    for number, name in enumerate(names):
        tied_backend.create_adapter(name, ref.spec(2 + number, seed=number))
        ref.randomize(tied_backend, name, seed=number)
    items = [ref.item(n, d, f"op-{n}") for n, d in zip(names, data, strict=True)]

    together = ref.run(tied_backend, *items)
    gradients = [ref.gradients_of(tied_backend, name) for name in names]
    for index, name in enumerate(names):
        tied_backend.drop_gradients(name)
        (alone,) = ref.run(tied_backend, items[index])
        assert ref.numbers(alone) == ref.numbers(together[index])
        again = ref.gradients_of(tied_backend, name)
        assert all(torch.equal(again[key], gradients[index][key]) for key in again)
        tied_backend.unload(name)


def test_every_row_of_a_ragged_batch_gets_its_own_logprobs_in_order(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    datums = ref.ragged((17, 1, 128, 2, 17), np.random.default_rng(5), vocab=97)
    (together,) = ref.run(tied_backend, ref.item(model_id, datums), forward_only=True)
    for one, ours in zip(datums, together.logprobs, strict=True):
        (alone,) = ref.run(tied_backend, ref.item(model_id, [one]), forward_only=True)
        assert ours.shape == (one.num_tokens,)
        assert np.abs(ours.numpy() - alone.logprobs[0].numpy()).max() <= 1e-5


def test_a_batch_over_the_token_limit_is_cut_and_gives_the_same_numbers(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    definition = random_models["tied"]
    limits = definition.limits.model_copy(update={"max_tokens_per_rank": 20})
    narrow = ref.start(definition.model_copy(update={"limits": limits}))
    datums = ref.ragged((3, 17, 40, 8, 2), np.random.default_rng(6), vocab=97)
    try:
        outputs = []
        for backend in (narrow, tied_backend):
            backend.create_adapter(model_id, ref.spec(4))
            ref.randomize(backend, model_id)
            outputs += ref.run(backend, ref.item(model_id, datums))
        for ours, theirs in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
            assert np.abs(ours.numpy() - theirs.numpy()).max() <= 1e-5
        losses = [output.metrics["loss:sum"] for output in outputs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        gradients = [ref.gradients_of(backend, model_id) for backend in (narrow, tied_backend)]
        assert ref.worst(*gradients) <= 1e-5
        # 40 alone, 17 with 3, 8 with 2: three microbatches with room for 20 each.
        assert outputs[0].metrics["microbatch_fill:mean"] == pytest.approx(70 / 60)
    finally:
        narrow.close()


@pytest.mark.parametrize("lengths", [(17,), (17, 5, 5)])
def test_a_stream_that_is_filled_up_as_on_a_gpu_has_the_numbers_of_one_that_is_not(
    random_models: dict[str, Definition], model_id: str, lengths: tuple[int, ...]
) -> None:
    backend = ref.start(random_models["tied"])
    datums = ref.ragged(lengths, np.random.default_rng(6), vocab=97)
    backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(backend, model_id)
    found = []
    try:
        runner = backend.ranks.rank._batches
        for room in (None, 64):
            layout = replace(runner.limits.layout, bucket_tokens=room)
            runner.limits = replace(runner.limits, layout=layout)
            (output,) = ref.run(backend, ref.item(model_id, datums))
            found.append((output, ref.gradients_of(backend, model_id)))
            backend.drop_gradients(model_id)
    finally:
        backend.close()
    (bare, expected), (filled, gradients) = found
    assert bare.metrics["padded_tokens:sum"] == sum(lengths)
    assert filled.metrics["padded_tokens:sum"] == 32
    for ours, theirs in zip(filled.logprobs, bare.logprobs, strict=True):
        assert np.abs(ours.numpy() - theirs.numpy()).max() <= 1e-5
    assert ref.worst(gradients, expected) <= 1e-5


def test_a_pass_says_what_it_took(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(2))
    datums = ref.ragged((4, 20), np.random.default_rng(7), vocab=97)
    started = time.perf_counter()
    (output,) = ref.run(tied_backend, ref.item(model_id, datums))
    wall_s = time.perf_counter() - started
    (forward,) = ref.run(tied_backend, ref.item(model_id, datums), forward_only=True)

    metrics = output.metrics
    assert all(name.count(":") == 1 for name in metrics)
    assert metrics["tokens:sum"] == metrics["padded_tokens:sum"] == 24.0
    limit = random_models["tied"].limits.max_tokens_per_rank
    assert metrics["microbatch_fill:mean"] == pytest.approx(24 / limit)
    assert 0 < metrics["seconds:sum"] <= wall_s
    model = architecture_of(random_models["tied"])
    linears = 2 * 24 * (model.layer_weights + model.head_weights)
    scores = 2 * model.layers * model.attention_width * (4**2 + 20**2)
    assert forward.metrics["model_flops:sum"] == linears + scores
    assert metrics["model_flops:sum"] == 2 * linears + 3 * scores
    speed = metrics["model_flops:sum"] / metrics["seconds:sum"]
    assert metrics["model_flops_per_s_per_rank:mean"] == pytest.approx(speed)
    assert metrics["peak_memory_bytes:max"] > 10e6  # torch alone is more
    assert "utilisation:mean" not in metrics  # nobody knows this CPU's peak


def _bad_items(model_id: str) -> dict[str, ref.Datum]:
    one = ref.datum(4, np.random.default_rng(8), vocab=97, weights=np.ones(4))
    inputs = dict(one.loss_inputs)
    return {
        "nan weight": ref.Datum(
            tokens=one.tokens,
            loss_inputs={**inputs, "weights": Tensor.of([1, math.nan, 1, 1], "float32")},
        ),
        "target out of range": ref.Datum(
            tokens=one.tokens,
            loss_inputs={**inputs, "target_tokens": Tensor.of([1, 2, 97, 3], "int64")},
        ),
        "token out of range": ref.Datum(
            tokens=Tensor.of([1, -1, 2, 3], "int32"), loss_inputs=inputs
        ),
        "too few weights": ref.Datum(
            tokens=one.tokens, loss_inputs={**inputs, "weights": Tensor.of([1.0], "float32")}
        ),
        "too long": ref.datum(257, np.random.default_rng(9), vocab=97),
        "unknown input": ref.Datum(
            tokens=one.tokens, loss_inputs={**inputs, "advantages": inputs["weights"]}
        ),
    }


@pytest.mark.parametrize("case", list(_bad_items("")))
def test_a_bad_item_fails_alone_and_drops_only_its_models_window(
    tied_backend: MilesBackend, model_id: str, case: str
) -> None:
    bad, good = f"{model_id}-bad", f"{model_id}-good"
    rng = np.random.default_rng(10)
    data = ref.ragged((6, 9), rng, vocab=97)
    for name in (bad, good):
        tied_backend.create_adapter(name, ref.spec(3))
        ref.randomize(tied_backend, name)
    ref.run(tied_backend, ref.item(good, data))
    expected = ref.gradients_of(tied_backend, good)
    tied_backend.drop_gradients(good)
    ref.run(tied_backend, ref.item(bad, data))  # a window that the failure must end

    outputs = ref.run(
        tied_backend, ref.item(bad, [_bad_items(bad)[case]], "bad"), ref.item(good, data, "good")
    )

    assert outputs[0].error
    assert outputs[1].error is None
    found = ref.gradients_of(tied_backend, good)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(bad, ref.ADAM)
    ref.run(tied_backend, ref.item(bad, data))
    assert tied_backend.optim_step(bad, ref.ADAM)["skipped"] == 0.0
    for name in (bad, good):
        tied_backend.unload(name)


def test_a_loss_that_overflows_is_an_error_of_its_item(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(3))
    one = ref.datum(
        3,
        np.random.default_rng(11),
        vocab=97,
        logprobs=[-1.0, -2e4, -1.0],
        advantages=[1.0, 1.0, 1.0],
    )
    (output,) = ref.run(tied_backend, ref.item(model_id, [one]), loss="importance_sampling")
    assert output.error is not None
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)


def test_an_item_of_an_unknown_model_is_an_error_of_that_item(tied_backend: MilesBackend) -> None:
    one = ref.datum(3, np.random.default_rng(12), vocab=97)
    (output,) = ref.run(tied_backend, ref.item("nobody", [one]))
    assert output.error is not None
    tied_backend.unload("nobody")


def test_bfloat16_base_weights_train_float32_adapters_close_to_float32(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    half = ref.start(random_models["tied"].model_copy(update={"dtype": "bfloat16"}))
    datums = ref.ragged((5, 30), np.random.default_rng(15), vocab=97)
    try:
        outputs = []
        for backend in (half, tied_backend):
            backend.create_adapter(model_id, ref.spec(4))
            ref.randomize(backend, model_id)
            outputs += ref.run(backend, ref.item(model_id, datums))
        assert outputs[0].error is None
        for ours, theirs in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
            # Eight bits of mantissa over a few layers, on logits of size ten.
            assert np.abs(ours.numpy() - theirs.numpy()).max() <= 0.5
        gradients = ref.gradients_of(half, model_id)
        assert all(tensor.dtype == torch.float32 for tensor in gradients.values())
        assert ref.worst(gradients, ref.gradients_of(tied_backend, model_id)) <= 0.25
        losses = [outputs[0].metrics["loss:sum"]]
        params = replace(ref.ADAM, learning_rate=1e-2)
        for _ in range(4):
            assert half.optim_step(model_id, params)["skipped"] == 0.0
            (output,) = ref.run(half, ref.item(model_id, datums))
            losses.append(output.metrics["loss:sum"])
        assert sorted(losses, reverse=True) == losses  # every step reaches what passes compute with
        assert len(set(losses)) == len(losses)
    finally:
        half.close()
