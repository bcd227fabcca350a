"""Qwen3, dense: 0.6B to 32B, each on the smallest layout that trains it comfortably.

Sizes from the models' own `config.json`. A size derives from the one below it by what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from lilo_definitions.architecture import Architecture
from lilo_definitions.definition import Definition
from lilo_definitions.families.model_spec import by_name, model_spec
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.topology import Topology
from lilo_definitions.trainer import Trainer

_0_6B = Architecture(
    family="qwen3",
    layers=28,
    hidden=1024,
    inner=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=151_936,
    context=40_960,
    tied=True,
)
_1_7B = replace(_0_6B, hidden=2048, inner=6144)
_4B = replace(_1_7B, layers=36, hidden=2560, inner=9728, heads=32)
_8B = replace(_4B, hidden=4096, inner=12_288, tied=False)
_14B = replace(_8B, layers=40, hidden=5120, inner=17_408, heads=40)
_32B = replace(_14B, layers=64, inner=25_600, heads=64)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "Qwen/Qwen3-0.6B": _0_6B,
        "Qwen/Qwen3-1.7B": _1_7B,
        "Qwen/Qwen3-4B": _4B,
        "Qwen/Qwen3-8B": _8B,
        "Qwen/Qwen3-14B": _14B,
        "Qwen/Qwen3-32B": _32B,
    }
)
"""By name on the Hugging Face hub."""


def qwen3_0_6b() -> Definition:
    """0.6B on one GPU: 16 adapters, 16k tokens."""
    return Definition(
        name="qwen3_0_6b",
        summary="Qwen3 0.6B at 16k on one H100",
        model=model_spec("Qwen/Qwen3-0.6B", ARCHITECTURES),
        context=16_384,
        dtype="bfloat16",
        lora=Lora(slots=16, max_rank=32, alpha=32.0, targets=("attn", "mlp", "unembed")),
        topology=Topology(device="cuda", gpu="H100", gpus_per_node=1),
        trainer=Trainer(keep_activations="auto"),
        limits=Limits(
            max_tokens_per_rank=16_384,
            # Eight full rows: about ten seconds of work, the longest that another model waits.
            max_batch_tokens=131_072,
            command_s_per_token=0.002,
        ),
    )


def qwen3_0_6b_cpu() -> Definition:
    """0.6B in float32 on one CPU rank: a real model on a machine without GPUs, slowly."""
    return qwen3_0_6b().derive(
        name="qwen3_0_6b_cpu",
        summary="Qwen3 0.6B at 2k on one CPU rank; slow, needs no GPU",
        model={"name": "Qwen/Qwen3-0.6B:cpu"},
        context=2048,
        dtype="float32",
        lora={"slots": 4},
        topology={"device": "cpu", "gpu": None, "gpus_per_node": 0},
        # Activations of 2,048 tokens take about 6.5 GB beside 2.4 GB of weights and 1.6 GB of adapters.
        limits={
            "max_tokens_per_rank": 2048,
            "max_batch_tokens": 8192,
            "command_s_per_token": 0.2,
        },
        sampler={"sequences": 8, "max_adapters": 8},
        trainer={"keep_activations": "all"},
    )


def qwen3_1_7b() -> Definition:
    """1.7B on one GPU."""
    return qwen3_0_6b().derive(
        name="qwen3_1_7b",
        summary="Qwen3 1.7B at 16k on one H100",
        model=model_spec("Qwen/Qwen3-1.7B", ARCHITECTURES),
        lora={"slots": 8},
    )


def qwen3_4b() -> Definition:
    """4B on one GPU."""
    return qwen3_1_7b().derive(
        name="qwen3_4b",
        summary="Qwen3 4B at 16k on one H100",
        model=model_spec("Qwen/Qwen3-4B", ARCHITECTURES),
    )


def qwen3_8b() -> Definition:
    """8B on one GPU with more memory."""
    return qwen3_4b().derive(
        name="qwen3_8b",
        summary="Qwen3 8B at 16k on one H200",
        model=model_spec("Qwen/Qwen3-8B", ARCHITECTURES),
        topology={"gpu": "H200"},
    )


def qwen3_14b() -> Definition:
    """14B on one GPU."""
    return qwen3_8b().derive(
        name="qwen3_14b",
        summary="Qwen3 14B at 16k on one H200",
        model=model_spec("Qwen/Qwen3-14B", ARCHITECTURES),
    )


def qwen3_32b() -> Definition:
    """32B on four GPUs, tensor-parallel: the weights alone are 66 GB, and the sampler has them whole beside a rank."""
    return qwen3_14b().derive(
        name="qwen3_32b",
        summary="Qwen3 32B at 16k on four H200, TP4",
        model=model_spec("Qwen/Qwen3-32B", ARCHITECTURES),
        topology={"gpus_per_node": 4, "tp": 4},
        sampler={"max_adapters": 8},
    )


RECIPES = by_name(
    qwen3_0_6b,
    qwen3_0_6b_cpu,
    qwen3_1_7b,
    qwen3_4b,
    qwen3_8b,
    qwen3_14b,
    qwen3_32b,
)
"""The definitions of this family."""
