"""Builds the real trainer and the real sampling engine from a definition and prints what they were built with, as JSON.

A program of its own: a process's distributed groups have one time limit, and other tests of a run may hold theirs.
Reads the definition from standard input; the argument is a folder for checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lilo_definitions import Definition
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.sampling.engine import SamplerConfig
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.sampler.embedded import EmbeddedSampler


def main() -> None:
    """One JSON object: field of the definition -> what was found."""
    definition = Definition.model_validate_json(sys.stdin.read())
    found = {**of_trainer(definition, Path(sys.argv[1])), **of_sampler(definition)}
    print(json.dumps(found))


def of_trainer(definition: Definition, root: Path) -> dict[str, object]:
    backend = MilesBackend(
        BackendConfig(definition=definition, checkpoints_root=str(root), epoch=1)
    )
    info, rank = backend.describe(), backend.ranks.rank
    model = rank._model
    created = 0
    refused = ""
    for index in range(definition.lora.slots + 1):
        try:
            backend.create_adapter(f"m{index}", _spec(definition.lora.max_rank, definition))
            created += 1
        except Exception as error:
            refused = str(error)
    group = dist.group.WORLD
    assert group is not None
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    parts = {name.split(".")[-2] for name in rank.adapter("m0").sizes}
    found: dict[str, object] = {
        "model.name": info.base_model,
        "model.vocab_size": model.head_weight.shape[0],
        "context": info.max_context,
        "dtype": str(model.head_weight.dtype).removeprefix("torch."),
        "lora.slots": created,
        "slots refused": refused,
        "lora.max_rank": info.max_rank,
        "lora.targets": sorted(
            {"attn"} & {"attn" for one in parts if one == "q_proj"}
            | {"mlp" for one in parts if one == "up_proj"}
            | {"unembed" for one in parts if one == "lm_head"}
        ),
        "limits.max_tokens_per_rank": rank._batches.limits.max_tokens,
        "limits.logprob_chunk_tokens": rank._batches.limits.chunk_tokens,
        "limits.distributed_timeout_minutes": timeout.total_seconds() / 60,
        "topology.align_sequences_to_parallel_layout": rank._batches.limits.layout.alignment.mode,
        "trainer.keep_activations": min(rank._batches.limits.levels(8)),
        "trainer.offload_inputs": model._running.inputs is not None,
        "trainer.pack_models": rank._batches._packs_models,
        "lora.alpha": rank.adapter("m0").spec.alpha,
        "trainer.captures": _waits_in(backend, root),
    }
    backend.close()
    return found


def _waits_in(backend: MilesBackend, root: Path) -> str:
    """Where a capture waits to be published."""
    backend.capture("m0", "training")
    return "volume" if list(root.glob(".captures/*/*.safetensors")) else "memory"


def _spec(lora_rank: int, definition: Definition) -> LoraSpec:
    on = definition.lora.targets
    return LoraSpec(
        lora_rank=lora_rank,
        alpha=definition.lora.alpha,
        seed=1,
        train_attn="attn" in on,
        train_mlp="mlp" in on,
        train_unembed=True,
    )


def of_sampler(definition: Definition) -> dict[str, object]:
    sampler = EmbeddedSampler(SamplerConfig(definition=definition))
    return {
        "sampler.sequences": sampler._worker._batch._max_rows,
        "sampler.max_adapters": sampler._info.max_adapters,
        "sampler context": sampler._info.max_context,
    }


if __name__ == "__main__":
    main()
