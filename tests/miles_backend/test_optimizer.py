"""AdamW against a float64 reference given the same gradients, and what a step must leave alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from lilo_engine.errors import InvalidRequest, NotFound
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref

TOLERANCE = 1e-6
"""max|d| / max|ref| of the weights: some roundings to float32 per step."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": 0.1, "learning_rate": 1e-2},
        {"grad_clip_norm": 0.5},
        {"beta1": 0.0, "beta2": 0.5, "eps": 1e-3},
    ],
)
def test_steps_equal_float64_adamw_given_the_same_gradients(
    tied_backend: MilesBackend, model_id: str, changes: dict[str, float]
) -> None:
    params = replace(ref.ADAM, **changes)
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(7)
    start = ref.flat(ref.state_of(tied_backend, model_id).weights)
    gradients: list[np.ndarray] = []
    for _ in range(5):
        datums = ref.ragged((4, 9), rng, vocab=97)
        ref.run(tied_backend, ref.item(model_id, datums))
        gradients.append(ref.flat(ref.gradients_of(tied_backend, model_id)))
        metrics = tied_backend.optim_step(model_id, params)

        norm = math.sqrt(float((gradients[-1].astype(np.float64) ** 2).sum()))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert metrics["skipped"] == 0.0

    ours = ref.flat(ref.state_of(tied_backend, model_id).weights)
    expected = ref.adamw64(start, gradients, [params] * 5)
    assert np.abs(ours - expected).max() / np.abs(expected).max() <= TOLERANCE
    assert ref.state_of(tied_backend, model_id).optimizer_step == 5


def test_a_step_clears_the_gradients_and_another_needs_new_ones(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)
    one = ref.datum(5, np.random.default_rng(8), vocab=97)
    ref.run(tied_backend, ref.item(model_id, [one]))
    tied_backend.optim_step(model_id, ref.ADAM)
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)
    with pytest.raises(NotFound):
        tied_backend.optim_step("nobody", ref.ADAM)


def test_a_non_finite_gradient_skips_the_step_and_clears_the_window(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    before = ref.state_of(tied_backend, model_id)
    one = ref.datum(5, np.random.default_rng(9), vocab=97, weights=np.full(5, 3e38))
    (output,) = ref.run(tied_backend, ref.item(model_id, [one]))
    assert output.error is None  # the loss is finite; its gradient overflows

    metrics = tied_backend.optim_step(model_id, ref.ADAM)

    assert metrics["skipped"] == 1.0
    assert "grad_norm" not in metrics  # no number that JSON cannot carry
    after = ref.state_of(tied_backend, model_id)
    assert after.optimizer_step == 0
    for name in before.weights:
        assert torch.equal(before.weights[name], after.weights[name])
        assert not after.exp_avg[name].any()
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)
    plain = ref.Datum(
        tokens=one.tokens, loss_inputs={"target_tokens": one.loss_inputs["target_tokens"]}
    )
    ref.run(tied_backend, ref.item(model_id, [plain]))
    assert tied_backend.optim_step(model_id, ref.ADAM)["skipped"] == 0.0


@pytest.mark.parametrize("order", ["abAB", "abBA", "aAbB", "baAB"])
def test_interleaved_models_end_bit_for_bit_where_they_end_alone(
    tied_backend: MilesBackend, model_id: str, order: str
) -> None:
    """Lower case: a pass of that model; upper case: its step, with its own learning rate and clipping."""
    params = {
        "A": replace(ref.ADAM, learning_rate=1e-2, grad_clip_norm=0.3),
        "B": replace(ref.ADAM, learning_rate=1e-4, weight_decay=0.2),
    }
    data = {
        "A": ref.ragged((6, 3), np.random.default_rng(10), vocab=97),
        "B": ref.ragged((2, 17), np.random.default_rng(11), vocab=97),
    }

    def play(letters: str, suffix: str) -> dict[str, dict[str, torch.Tensor]]:
        names = {key: f"{model_id}-{suffix}-{key}" for key in "AB" if key in letters.upper()}
        for key, name in names.items():
            tied_backend.create_adapter(name, ref.spec(4, seed=ord(key)))
            ref.randomize(tied_backend, name, seed=ord(key))
        for letter in letters * 3:
            key = letter.upper()
            if letter == key:
                tied_backend.optim_step(names[key], params[key])
            else:
                ref.run(tied_backend, ref.item(names[key], data[key]))
        ends = {k: dict(ref.state_of(tied_backend, n).weights) for k, n in names.items()}
        for name in names.values():
            tied_backend.unload(name)
        return ends

    together = play(order, "both")
    alone = {**play("aA", "alone"), **play("bB", "alone")}

    for key, weights in together.items():
        for name, weight in weights.items():
            assert torch.equal(weight, alone[key][name]), (key, name)
