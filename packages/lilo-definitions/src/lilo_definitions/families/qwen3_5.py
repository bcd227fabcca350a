"""Qwen3.5 to 3.8 hybrids: gated delta nets with softmax attention in every fourth layer; 9B and 27B, 2k to 256k tokens.

The `*_miles_lora_*` definitions carry the layouts and numbers of the matched raw-Miles runs
(`lilo definitions miles-args`), so that the two can be compared on equal hardware: full recompute, alpha 32, adapters of
rank 32. Full fine-tuning is not offered: adapters over a frozen base are what this system is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from lilo_definitions.architecture import Architecture, LinearAttention
from lilo_definitions.definition import Definition
from lilo_definitions.deployment import Deployment
from lilo_definitions.families.model_spec import by_name, model_spec
from lilo_definitions.limits import Limits
from lilo_definitions.lora import Lora
from lilo_definitions.sampler import Pool, Sampler
from lilo_definitions.topology import Topology
from lilo_definitions.trainer import Trainer

_27B = Architecture(
    family="qwen3_5",
    layers=64,
    hidden=5120,
    inner=17_408,
    heads=24,
    kv_heads=4,
    head_dim=256,
    vocab=248_320,
    context=262_144,
    tied=False,
    linear=LinearAttention(key_heads=16, value_heads=48),
)
_9B = replace(
    _27B,
    layers=32,
    hidden=4096,
    inner=12_288,
    heads=16,
    linear=LinearAttention(key_heads=16, value_heads=32),
)
_4B = replace(_9B, hidden=2560, inner=9216, tied=True)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "Qwen/Qwen3.8-27B": _27B,
        "Qwen/Qwen3.6-27B": _27B,
        "Qwen/Qwen3.5-27B": _27B,
        "Qwen/Qwen3.5-9B": _9B,
        "Qwen/Qwen3.5-9B-Base": _9B,
        "Qwen/Qwen3.5-4B": _4B,
    }
)
"""By name on the Hugging Face hub; the text model, without the vision tower and the prediction layer."""


def qwen3_8_27b_miles_lora_16k() -> Definition:
    """27B at 16k on one node: TP4 x DP2."""
    return Definition(
        name="qwen3_8_27b_miles_lora_16k",
        summary="Qwen3.8 27B at 16k on 8 H200, TP4 x DP2",
        model=model_spec("Qwen/Qwen3.8-27B", ARCHITECTURES, suffix="16k"),
        context=16_384,
        dtype="bfloat16",
        # Sampling engines could not apply an adapter of the head when the baseline was made, so it has none.
        lora=Lora(slots=6, max_rank=32, alpha=32.0, targets=("attn", "mlp")),
        topology=Topology(device="cuda", gpu="H200", gpus_per_node=8, tp=4, dp=2),
        trainer=Trainer(keep_activations="input"),
        limits=Limits(
            max_tokens_per_rank=16_384,
            # Eight full rows a call.
            max_batch_tokens=131_072,
            max_queued_operations=256,
            publication_workers=8,
            # Reading 54 GB of weights from a network volume, and compiling kernels.
            startup_timeout_s=3600.0,
            command_s_per_token=0.01,
            distributed_timeout_minutes=30.0,
        ),
        sampler=Sampler(
            engine="sglang",
            sequences=32,
            max_adapters=256,
            pool=Pool(
                gpu="H200",
                gpus_per_replica=1,
                min_replicas=8,
                max_replicas=8,
                target_sequences=16,
            ),
        ),
        deployment=Deployment(cpus_per_node=16.0, memory_gib_per_node=256),
    )


def qwen3_8_27b_miles_lora_64k() -> Definition:
    """27B at 64k on one node: TP4 x CP2."""
    return qwen3_8_27b_miles_lora_16k().derive(
        name="qwen3_8_27b_miles_lora_64k",
        summary="Qwen3.8 27B at 64k on 8 H200, TP4 x CP2",
        model={"name": "Qwen/Qwen3.8-27B:64k"},
        context=65_536,
        topology={"tp": 4, "cp": 2, "dp": 1},
        limits={"max_tokens_per_rank": 32_768, "max_batch_tokens": 524_288},
        sampler={"sequences": 16, "pool": {"target_sequences": 8}},
        deployment={"kernel_cache_volume": "lilo-kernel-cache"},
    )


def qwen3_8_27b_miles_lora_128k() -> Definition:
    """27B at 128k on one node: TP2 x CP4; sampling replicas of two GPUs."""
    return qwen3_8_27b_miles_lora_64k().derive(
        name="qwen3_8_27b_miles_lora_128k",
        summary="Qwen3.8 27B at 128k on 8 H200, TP2 x CP4",
        model={"name": "Qwen/Qwen3.8-27B:128k"},
        context=131_072,
        topology={"tp": 2, "cp": 4},
        limits={"max_batch_tokens": 1_048_576},
        sampler={
            "sequences": 8,
            "pool": {
                "gpus_per_replica": 2,
                "min_replicas": 4,
                "max_replicas": 4,
                "target_sequences": 4,
            },
        },
        deployment={"kernel_cache_volume": None},
    )


def qwen3_8_27b_miles_lora_256k() -> Definition:
    """27B at 256k on two nodes: TP2 x CP8 x DP1 on 16 H200 with RDMA; sampling replicas of four GPUs."""
    return qwen3_8_27b_miles_lora_128k().derive(
        name="qwen3_8_27b_miles_lora_256k",
        summary="Qwen3.8 27B at 256k on 2 nodes x 8 H200, TP2 x CP8",
        model={"name": "Qwen/Qwen3.8-27B:256k"},
        context=262_144,
        topology={"nodes": 2, "gpus_per_node": 8, "tp": 2, "cp": 8, "dp": 1, "rdma": True},
        # What is captured for publication lies on the checkpoint volume, where every node can reach it.
        trainer={"captures": "volume"},
        limits={
            # One row: several in one call could wedge every process group across both nodes at once.
            "max_forward_backward_batch": 1,
            "max_batch_tokens": 262_144,
            # One pass over 250k tokens is longer than NCCL's default of 10 minutes while kernels compile.
            "distributed_timeout_minutes": 120.0,
        },
        sampler={
            "sequences": 4,
            "pool": {
                "gpus_per_replica": 4,
                "min_replicas": 2,
                "max_replicas": 2,
                "target_sequences": 2,
            },
        },
    )


def qwen3_5_9b_base_miles_lora_16k() -> Definition:
    """9B base at 16k: TP4 on four H100, adapters on the head too."""
    return qwen3_8_27b_miles_lora_16k().derive(
        name="qwen3_5_9b_base_miles_lora_16k",
        summary="Qwen3.5 9B base at 16k on 4 H100, TP4",
        model=model_spec("Qwen/Qwen3.5-9B-Base", ARCHITECTURES, suffix="16k"),
        lora={"targets": ("attn", "mlp", "unembed")},
        topology={"gpu": "H100", "gpus_per_node": 4, "tp": 4, "dp": 1},
        sampler={"sequences": 32, "max_adapters": 64, "pool": {"target_sequences": 16}},
        deployment={"cpus_per_node": 8.0, "memory_gib_per_node": 128},
    )


def qwen3_5_9b_base_miles_lora_2k() -> Definition:
    """9B base at 2k: a smoke test of the whole path; its pool starts from nothing."""
    return qwen3_5_9b_base_miles_lora_16k().derive(
        name="qwen3_5_9b_base_miles_lora_2k",
        summary="Qwen3.5 9B base at 2k on 4 H200, TP4; smoke test",
        model={"name": "Qwen/Qwen3.5-9B-Base:2k"},
        context=2048,
        lora={"slots": 4},
        topology={"gpu": "H200"},
        limits={"max_tokens_per_rank": 2048, "max_batch_tokens": 16_384},
        sampler={"max_adapters": 32, "pool": {"min_replicas": 0}},
        deployment={"kernel_cache_volume": "lilo-kernel-cache"},
    )


def qwen3_5_9b_base_miles_lora_16k_single() -> Definition:
    """As `..._16k` for one tenant alone: one slot, since a slot that nobody may take is one too many."""
    return qwen3_5_9b_base_miles_lora_16k().derive(
        name="qwen3_5_9b_base_miles_lora_16k_single",
        summary="Qwen3.5 9B base at 16k for one tenant, 4 H100, TP4",
        model={"name": "Qwen/Qwen3.5-9B-Base:16k-single"},
        lora={"slots": 1},
    )


def qwen3_5_9b_base_miles_lora_deterministic() -> Definition:
    """As `..._16k` with equal bits for equal inputs; one sampling replica."""
    return qwen3_5_9b_base_miles_lora_16k().derive(
        name="qwen3_5_9b_base_miles_lora_deterministic",
        summary="Qwen3.5 9B base at 16k, deterministic, 4 H100, TP4",
        model={"name": "Qwen/Qwen3.5-9B-Base:16k-deterministic"},
        trainer={"deterministic": True},
        sampler={"sequences": 64, "pool": {"min_replicas": 1, "max_replicas": 1}},
    )


def qwen3_5_9b_base_miles_lora_deterministic_single() -> Definition:
    """As `..._deterministic` for one tenant alone."""
    return qwen3_5_9b_base_miles_lora_deterministic().derive(
        name="qwen3_5_9b_base_miles_lora_deterministic_single",
        summary="Qwen3.5 9B base at 16k, deterministic, for one tenant, 4 H100",
        model={"name": "Qwen/Qwen3.5-9B-Base:16k-deterministic-single"},
        lora={"slots": 1},
    )


def qwen3_5_9b_miles_lora_16k() -> Definition:
    """9B at 16k: TP8 on eight H100."""
    return qwen3_5_9b_base_miles_lora_16k().derive(
        name="qwen3_5_9b_miles_lora_16k",
        summary="Qwen3.5 9B at 16k on 8 H100, TP8",
        model=model_spec("Qwen/Qwen3.5-9B", ARCHITECTURES, suffix="16k"),
        lora={"targets": ("attn", "mlp")},
        topology={"gpus_per_node": 8, "tp": 8},
        sampler={"max_adapters": 256},
    )


def qwen3_5_9b_miles_lora_16k_dp2() -> Definition:
    """9B at 16k: TP4 x DP2 on eight H100."""
    return qwen3_5_9b_miles_lora_16k().derive(
        name="qwen3_5_9b_miles_lora_16k_dp2",
        summary="Qwen3.5 9B at 16k on 8 H100, TP4 x DP2",
        model={"name": "Qwen/Qwen3.5-9B:16k-dp2"},
        topology={"tp": 4, "dp": 2},
    )


def qwen3_5_9b_miles_lora_64k() -> Definition:
    """9B at 64k: TP8 on eight H200; a pool that grows from four replicas to eight."""
    return qwen3_5_9b_miles_lora_16k().derive(
        name="qwen3_5_9b_miles_lora_64k",
        summary="Qwen3.5 9B at 64k on 8 H200, TP8",
        model={"name": "Qwen/Qwen3.5-9B:64k"},
        context=65_536,
        lora={"slots": 4, "targets": ("attn", "mlp", "unembed")},
        topology={"gpu": "H200"},
        limits={
            "max_tokens_per_rank": 65_536,
            "max_batch_tokens": 524_288,
            "publication_workers": 4,
        },
        sampler={
            "max_adapters": 64,
            "pool": {"min_replicas": 4, "adapters_per_batch": 4, "scale_down_s": 1200},
        },
    )


def qwen3_5_9b_dapo_sweep() -> Definition:
    """9B base at 16k with 32 adapters: many clients in large combined batches."""
    return qwen3_5_9b_base_miles_lora_16k().derive(
        name="qwen3_5_9b_dapo_sweep",
        summary="Qwen3.5 9B base at 16k, 32 adapters, 8 H200, TP8; benchmark",
        model={"name": "Qwen/Qwen3.5-9B-Base:dapo-sweep"},
        lora={"slots": 32},
        topology={"gpu": "H200", "gpus_per_node": 8, "tp": 8},
        limits={"max_tokens_per_rank": 114_688, "max_batch_tokens": 1_048_576},
        sampler={
            "sequences": 128,
            "max_adapters": 128,
            "pool": {"target_sequences": 128, "adapters_per_batch": 16, "max_queued": 256},
        },
        deployment={"cpus_per_node": 16.0, "memory_gib_per_node": 64},
    )


RECIPES = by_name(
    qwen3_8_27b_miles_lora_16k,
    qwen3_8_27b_miles_lora_64k,
    qwen3_8_27b_miles_lora_128k,
    qwen3_8_27b_miles_lora_256k,
    qwen3_5_9b_base_miles_lora_2k,
    qwen3_5_9b_base_miles_lora_16k,
    qwen3_5_9b_base_miles_lora_16k_single,
    qwen3_5_9b_base_miles_lora_deterministic,
    qwen3_5_9b_base_miles_lora_deterministic_single,
    qwen3_5_9b_miles_lora_16k,
    qwen3_5_9b_miles_lora_16k_dp2,
    qwen3_5_9b_miles_lora_64k,
    qwen3_5_9b_dapo_sweep,
)
"""The definitions of this family."""
