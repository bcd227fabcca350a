"""Checkpoints of hybrids: a rank's part of in_proj_qkv and of a gated q_proj is several ranges of the module's rows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.adapter_state import AdapterState, assemble
from lilo_miles_backend.checkpoints import load_training, persist_training
from lilo_miles_backend.families.shape import DeltaShape, ModelShape
from lilo_miles_backend.ranks.collectives import Axis
from lilo_miles_backend.ranks.sites import factor_shards, lora_sites
from lilo_miles_backend.shards import FactorShard
from lilo_volume.testing import run_ranks

from tests.miles_backend.checkpoints.conftest import assert_equal_states, destination

REF = CheckpointRef(run_id="0ab:train:0", kind="weights", name="one")
SHAPE = ModelShape(
    family="qwen3_5",
    vocab_size=30,
    hidden_size=16,
    intermediate_size=24,
    layers=("delta", "softmax"),
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope_theta=1e7,
    rotary_dim=2,
    qk_norm=True,
    norm_offset=True,
    output_gate=True,
    delta=DeltaShape(key_heads=4, value_heads=8, key_dim=4, value_dim=2, conv_kernel=4),
)
SPEC = LoraSpec(lora_rank=2, alpha=4.0, seed=1, train_attn=True, train_mlp=True, train_unembed=True)


def shards(rank: int, tp: int) -> Mapping[str, FactorShard]:
    axis = Axis(name="tp", rank=rank, size=tp, group=None)
    return factor_shards(lora_sites(SHAPE, axis), SPEC.lora_rank, axis)


def whole() -> AdapterState:
    generator = torch.Generator().manual_seed(1)
    weights, exp_avg, exp_avg_sq = (
        {name: torch.randn(part.full, generator=generator) for name, part in shards(0, 1).items()}
        for _ in range(3)
    )
    return AdapterState(
        base_model="hybrid",
        spec=SPEC,
        optimizer_step=3,
        weights=weights,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
    )


def part_of(state: AdapterState, rank: int, tp: int) -> AdapterState:
    """What a rank of this layout computes with, in its own order."""
    held = shards(rank, tp)
    weights, exp_avg, exp_avg_sq = (
        {name: tensor[held[name].index].clone() for name, tensor in tensors.items()}
        for tensors in (state.weights, state.exp_avg, state.exp_avg_sq)
    )
    return AdapterState(
        base_model=state.base_model,
        spec=state.spec,
        optimizer_step=state.optimizer_step,
        weights=weights,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        shards={name: part for name, part in held.items() if part.dim is not None},
    )


def test_a_rank_holds_its_heads_queries_keys_and_values_and_its_queries_before_its_gates() -> None:
    held = shards(1, 2)
    qkv = held["model.layers.0.linear_attn.in_proj_qkv.lora_B"]
    assert qkv.ranges == ((8, 16), (24, 32), (40, 48))
    gated = held["model.layers.1.self_attn.q_proj.lora_B"]
    queries = [(start, start + 4) for start in range(32, 64, 8)]
    gates = [(start + 4, stop + 4) for start, stop in queries]
    assert list(gated.ranges) == queries + gates
    assert "model.layers.0.linear_attn.in_proj_b.lora_A" not in held


@pytest.mark.parametrize("written", [1, 2, 4])
def test_any_layout_reads_what_any_other_wrote_bit_for_bit(volume, written: int) -> None:
    state = whole()
    parts = [part_of(state, rank, written) for rank in range(written)]
    assert_equal_states(state, assemble(parts))

    outcomes = run_ranks(
        written,
        lambda group: persist_training(
            volume, group, parts[group.rank], destination(), layout={"tp": written}
        ),
    )

    assert len(set(outcomes)) == 1, outcomes
    assert_equal_states(state, load_training(volume, REF))
    for tp in (1, 2, 4):
        for rank in range(tp):
            part = load_training(volume, REF, place=lambda *_, r=rank, n=tp: shards(r, n))
            assert_equal_states(part_of(state, rank, tp), part)
