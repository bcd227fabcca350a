"""Trainer: how the ranks compute: what they keep for the backward, and what they promise about their numbers."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from lilo_definitions.part import Part

Keep: TypeAlias = Literal["input", "attention", "qkv", "all"]
"""What a layer keeps from its forward for its backward, each including the ones before it."""

KEEPS: tuple[Keep, ...] = get_args(Keep)
"""Least memory first."""

Levels: TypeAlias = tuple[Keep, ...]
"""Of each layer, first layer first."""

KeepActivations: TypeAlias = Literal["input", "attention", "qkv", "all", "auto"]
"""The same for all layers, or each chosen from the memory that is left."""


class Trainer(Part):
    """How the ranks compute."""

    keep_activations: KeepActivations = "all"
    """What a layer keeps for its backward; the rest is computed again. input is what others call full recompute:
    least memory, 20-26 % more time. attention also keeps the attention output, by far the best time per byte; qkv adds
    the projections; all computes nothing twice. auto gives each layer the most that fits, for the tokens of each
    microbatch; on CPU that is all."""
    offload_inputs: bool = False
    """Whether the inputs of layers wait for the backward in the host's memory, pinned, and not on the GPU: what `input`
    keeps then costs next to nothing there, and every other level that much less. Copies run beside what a layer
    computes, so it costs no time where rows are long; on CPU it saves nothing."""
    pack_models: bool = False
    """Whether a microbatch may hold rows of several models: faster with many small requests, and then co-batched
    equals alone to 1e-6 instead of bit for bit."""
    deterministic: bool = False
    """Same inputs, same layout, same bits. Always so on CPU; on CUDA it needs slower attention kernels."""
    captures: Literal["memory", "volume"] = "memory"
    """Where a frozen state waits to be published: in the host's memory, or in the checkpoint volume, which survives
    the container. An adapter is small enough for memory."""
