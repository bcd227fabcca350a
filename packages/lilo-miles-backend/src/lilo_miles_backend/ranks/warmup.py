"""Warm-up: tiny real passes at start, so that what a GPU needs on first use is not waited for by a client.

Kernels are compiled and loaded, libraries choose their algorithms, memory is taken: seconds each time, minutes the first
time a machine meets a model. The passes go through the front door (`BatchRunner`) with adapters that are removed
afterwards, once for every kind of pass that a definition allows: a long row and short ones, each class of lora_rank that
has kernels of its own, models together where they are packed. All ranks do the same, as with any command.

Not on CPUs, where nothing is compiled. Called by `rank.py` when the model is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from lilo_definitions import Definition
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.tensor import Tensor

from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.batch import BatchRunner
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.optimizer import adamw_step
from lilo_miles_backend.ranks.residents import Residents

_log = logging.getLogger(__name__)

LONG_TOKENS = 4608
"""Of a long row on each rank: above what attention computes with the kernels for short rows."""
SHORT_TOKENS = (70, 33, 9)
"""Of short rows, by which rows are packed."""
STEP = AdamParams(
    learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1e-6
)
"""Uses every operation of a step; the adapter is thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPass:
    """One pass: adapters of these ranks, each with rows of these lengths."""

    lora_ranks: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def words(self) -> str:
        """For the log."""
        ranks = ", ".join(map(str, self.lora_ranks))
        return f"lora_rank {ranks}, rows of {', '.join(map(str, self.lengths))} tokens"


def warm_passes(definition: Definition) -> tuple[WarmPass, ...]:
    """One pass for each kind that the definition allows, most usual first. Pure."""
    topology, highest = definition.topology, definition.lora.max_rank
    alignment = Alignment.of(topology, sequence_parallel=False)
    # Where rows may not be padded, others than these are refused.
    multiple = alignment.multiple if alignment.mode == "off" else 1

    def rows(*tokens: int) -> tuple[int, ...]:
        """So that every data-parallel rank has them all."""
        counts = (min(one, definition.context) // multiple for one in tokens)
        return tuple(max(1, count) * multiple for count in counts) * topology.dp

    long, short = rows(LONG_TOKENS * topology.cp), rows(*SHORT_TOKENS)
    classes = [rank for rank in (8, 16, 32, 64, 128) if rank < highest]
    passes = [
        WarmPass(lora_ranks=(highest,), lengths=long),
        WarmPass(lora_ranks=(highest,), lengths=short),
        # No multiple of 8: such rows of B cannot be read 16 bytes at a time.
        *(WarmPass(lora_ranks=(rank,), lengths=short) for rank in (*reversed(classes), 1)),
    ]
    if definition.trainer.pack_models and definition.lora.slots > 1:
        passes.append(WarmPass(lora_ranks=(highest, highest), lengths=short))
        # Adapters of unlike ranks have a sum of their own.
        passes.append(WarmPass(lora_ranks=(highest, 8 if highest > 8 else 1), lengths=short))
    return tuple(passes)


def warm_up(
    definition: Definition,
    model: BaseModel,
    batches: BatchRunner,
    residents: Residents,
    *,
    moved: Callable[[], None],
) -> None:
    """Run them all; nothing is left of it but what the device keeps.

    Args:
        definition: of the trainer.
        model: of this rank, loaded.
        batches: of this rank.
        residents: of this rank; there are none yet.
        moved: called after each pass, so that a long start is seen to get on.

    Raises:
        RuntimeError: a pass failed; it would have for the first client.
    """
    passes = warm_passes(definition)
    started = time.monotonic()
    _log.info(
        "making the GPU's kernels ready in %d passes; minutes the first time, then seconds",
        len(passes),
    )
    for number, one in enumerate(passes, start=1):
        before = time.monotonic()
        _run(one, definition, model, batches, residents)
        moved()
        seconds = time.monotonic() - before
        _log.info(
            "kernels: pass %d of %d (%s) took %.1f s", number, len(passes), one.words, seconds
        )
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    _log.info("the GPU's kernels are ready after %.1f s", time.monotonic() - started)


def _run(
    one: WarmPass,
    definition: Definition,
    model: BaseModel,
    batches: BatchRunner,
    residents: Residents,
) -> None:
    names = [ModelId(f"warm-up-{index}") for index in range(len(one.lora_ranks))]
    targets = definition.lora.targets
    for name, lora_rank in zip(names, one.lora_ranks, strict=True):
        spec = LoraSpec(
            lora_rank=lora_rank,
            alpha=definition.lora.alpha,
            seed=0,
            train_attn="attn" in targets,
            train_mlp="mlp" in targets,
            train_unembed="unembed" in targets,
        )
        residents.create(name, spec, drawn_seed=0)
    try:
        datums = tuple(_datum(length, definition.model.vocab_size) for length in one.lengths)
        items = tuple(
            WorkItem(operation_id=str(name), model_id=name, datums=datums) for name in names
        )
        for output in batches.run(
            Batch(loss="cross_entropy", config={}, forward_only=False, items=items)
        ):
            if output.error is not None:
                raise RuntimeError(f"the warm-up pass with {one.words} failed: {output.error}")
        for name in names:
            adamw_step(residents.adapter(name), STEP, model.parallel, model.optimizer)
    finally:
        model.activate()  # or the last active adapters would stay in memory
        for name in names:
            residents.remove(name)


def _datum(length: int, vocab_size: int) -> Datum:
    tokens = np.arange(length) % vocab_size
    return Datum(
        tokens=Tensor.of(tokens, "int32"),
        loss_inputs={
            "target_tokens": Tensor.of(tokens, "int64"),
            "weights": Tensor.of(np.ones(length), "float32"),
        },
    )
