"""Adapters of a backend: their first numbers, their shapes, and the slots they are in."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_engine.errors import InvalidRequest, Saturated, UserError
from lilo_engine.operations.operation import LoraSpec
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref


def test_equal_seeds_give_equal_adapters_and_b_starts_at_zero(
    tied_backend: MilesBackend, model_id: str
) -> None:
    names = [f"{model_id}-{i}" for i in range(4)]
    tied_backend.create_adapter(names[0], ref.spec(4, seed=7))
    tied_backend.create_adapter(names[1], ref.spec(4, seed=7, mlp=False))
    tied_backend.create_adapter(names[2], ref.spec(4, seed=8))
    tied_backend.create_adapter(names[3], ref.spec(4, seed=None))
    states = [ref.state_of(tied_backend, name) for name in names]
    for name in names:
        tied_backend.unload(name)

    for name, tensor in states[1].weights.items():  # seeds count per module, not per adapter
        assert torch.equal(tensor, states[0].weights[name])
    a = "model.layers.0.self_attn.q_proj.lora_A"
    assert not torch.equal(states[0].weights[a], states[2].weights[a])
    assert not torch.equal(states[0].weights[a], states[3].weights[a])
    assert states[3].spec.seed is not None
    assert all(not t.any() for n, t in states[0].weights.items() if n.endswith("lora_B"))
    # Kaiming uniform: within 1/sqrt(in), and filling it.
    bound = 1 / math.sqrt(states[0].weights[a].shape[1])
    assert 0.8 * bound < float(states[0].weights[a].abs().max()) <= bound


@pytest.mark.parametrize(
    "spec",
    [
        ref.spec(0),
        ref.spec(33),
        ref.spec(4, alpha=0.0),
        ref.spec(4, attn=False, mlp=False, unembed=False),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused(
    tied_backend: MilesBackend, model_id: str, spec: LoraSpec
) -> None:
    with pytest.raises(UserError):
        tied_backend.create_adapter(model_id, spec)


@pytest.mark.parametrize("lora_rank", [1, 32])
def test_the_smallest_and_largest_rank_train(
    tied_backend: MilesBackend, model_id: str, lora_rank: int
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(lora_rank))
    one = ref.datum(8, np.random.default_rng(0), vocab=97)
    losses: list[float] = []
    for _ in range(5):
        (output,) = ref.run(tied_backend, ref.item(model_id, [one]))
        losses.append(output.metrics["loss:sum"])
        tied_backend.optim_step(model_id, replace(ref.ADAM, learning_rate=1e-2))
    assert losses[-1] < 0.9 * losses[0]
    shapes = {
        t.shape
        for n, t in ref.state_of(tied_backend, model_id).weights.items()
        if n.endswith("lora_A")
    }
    assert {shape[0] for shape in shapes} == {lora_rank}


def test_the_same_spec_again_does_nothing_and_another_is_refused(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4, seed=None))
    before = ref.state_of(tied_backend, model_id).weights
    tied_backend.create_adapter(model_id, ref.spec(4, seed=None))
    after = ref.state_of(tied_backend, model_id).weights
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError):
        tied_backend.create_adapter(model_id, ref.spec(8, seed=None))


def test_slots_run_out_and_come_back_with_fresh_state(
    untied_backend: MilesBackend, random_models: dict[str, Definition]
) -> None:
    slots = random_models["untied"].lora.slots
    names = [f"slot-{i}" for i in range(slots)]
    one = ref.datum(4, np.random.default_rng(1), vocab=97)
    try:
        for name in names:
            untied_backend.create_adapter(name, ref.spec(1, seed=5))
        with pytest.raises(Saturated):
            untied_backend.create_adapter("one-too-many", ref.spec(1))
        fresh = ref.state_of(untied_backend, names[0]).weights
        ref.run(untied_backend, ref.item(names[3], [one]))
        untied_backend.optim_step(names[3], ref.ADAM)
        ref.run(untied_backend, ref.item(names[3], [one]))

        untied_backend.unload(names[3])
        untied_backend.create_adapter("successor", ref.spec(1, seed=5))

        state = ref.state_of(untied_backend, "successor")
        assert all(torch.equal(state.weights[name], fresh[name]) for name in fresh)
        assert state.optimizer_step == 0
        with pytest.raises(InvalidRequest):  # no gradients of the former holder
            untied_backend.optim_step("successor", ref.ADAM)
        (output,) = ref.run(untied_backend, ref.item(names[3], [one]))
        assert output.error is not None  # unloaded
    finally:
        for name in [*names, "successor", "one-too-many"]:
            untied_backend.unload(name)


def test_a_definition_without_unembed_trains_the_rest(
    random_models: dict[str, Definition], model_id: str
) -> None:
    definition = random_models["tied"]
    lora = definition.lora.model_copy(update={"targets": ("attn",)})
    backend = ref.start(definition.model_copy(update={"lora": lora}))
    try:
        backend.create_adapter(model_id, ref.spec(2, mlp=False))
        assert "lm_head.lora_A" not in ref.state_of(backend, model_id).weights
        with pytest.raises(InvalidRequest):
            backend.create_adapter("other", ref.spec(2))  # the mlp flag cannot be honoured
    finally:
        backend.close()
