"""An adapter of the tiny model with nothing zero in it, and a volume to publish it to."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from lilo_definitions import resolve_source
from lilo_engine.commands.command import Destination
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.operations.reference import CheckpointKind
from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.shards import shard
from lilo_volume import LocalVolume

LAYERS, HIDDEN, HEADS, KV, INNER, VOCAB = 4, 128, 128, 64, 384, 260
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HEADS),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HEADS, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Input and output features of the linears of one layer of the tiny model."""


def make_state(
    *, lora_rank: int = 8, unembed: bool = True, seed: int | None = 7, layers: int = LAYERS
) -> AdapterState:
    draw = torch.Generator().manual_seed(1)
    shapes = {
        f"model.layers.{layer}.{name}": sizes
        for layer in range(layers)
        for name, sizes in LINEARS.items()
    }
    if unembed:
        shapes["lm_head"] = (HIDDEN, VOCAB)
    weights = {}
    for name, (num_in, num_out) in shapes.items():
        weights[f"{name}.lora_A"] = torch.randn(lora_rank, num_in, generator=draw) * 0.1
        weights[f"{name}.lora_B"] = torch.randn(num_out, lora_rank, generator=draw) * 0.1

    def moments() -> dict[str, torch.Tensor]:
        return {k: torch.rand(t.shape, generator=draw) for k, t in weights.items()}

    return AdapterState(
        base_model="tiny",
        spec=LoraSpec(
            lora_rank=lora_rank,
            alpha=16.0,
            seed=seed,
            train_attn=True,
            train_mlp=True,
            train_unembed=unembed,
        ),
        optimizer_step=11,
        weights=weights,
        exp_avg=moments(),
        exp_avg_sq=moments(),
    )


def destination(
    kind: CheckpointKind = "weights", name: str = "one", *, overwrite: bool = False
) -> Destination:
    return Destination(
        run_id="0ab:train:0",
        kind=kind,
        name=name,
        order=5,
        overwrite=overwrite,
        metadata={"user_metadata": '{"by": "me"}'},
    )


@pytest.fixture(scope="module")
def state() -> AdapterState:
    return make_state()


@pytest.fixture
def volume(tmp_path: Path) -> LocalVolume:
    return LocalVolume(tmp_path)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return resolve_source("package:lilo_definitions/data/tiny")


ROW_PARALLEL = ("o_proj", "down_proj")
"""Linears whose input is cut over tensor-parallel ranks; of the others, the output is."""


def part_of(state: AdapterState, tp_rank: int, tp: int) -> AdapterState:
    """What tensor-parallel rank `tp_rank` of `tp` holds of a whole state."""
    shards = {
        name: shard((tensor.shape[0], tensor.shape[1]), cut_dim(name), tp_rank, tp)
        for name, tensor in state.weights.items()
    }

    def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[shards[name].index].clone() for name, tensor in tensors.items()}

    return dataclasses.replace(
        state,
        weights=cut(state.weights),
        exp_avg=cut(state.exp_avg),
        exp_avg_sq=cut(state.exp_avg_sq),
        shards={name: part for name, part in shards.items() if part.dim is not None},
    )


def placed(tp_rank: int, tp: int):
    """The `place` of a rank that wants its part, as `load_training` takes it."""

    def place(base_model, spec, shapes):
        return {name: shard(full, cut_dim(name), tp_rank, tp) for name, full in shapes.items()}

    return place


def cut_dim(name: str) -> int | None:
    """Along which dimension tensor-parallel ranks cut a factor; None: they do not."""
    module, _, factor = name.rpartition(".")
    if module.rpartition(".")[2] in ROW_PARALLEL:
        return 1 if factor == "lora_A" else None
    return 0 if factor == "lora_B" else None


def assert_equal_states(one: AdapterState, other: AdapterState) -> None:
    """Bit for bit, and detached float32 on the CPU."""
    assert (one.base_model, one.spec, one.optimizer_step) == (
        other.base_model,
        other.spec,
        other.optimizer_step,
    )
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        ours, theirs = getattr(one, part), getattr(other, part)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
            assert (theirs[name].dtype, theirs[name].device.type) == (torch.float32, "cpu")
            assert not theirs[name].requires_grad
