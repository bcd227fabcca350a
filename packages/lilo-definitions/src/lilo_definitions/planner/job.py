"""Job: what is planned: one model in one layout with its adapters and lengths. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_definitions.architecture import Architecture
from lilo_definitions.architectures import architecture_of
from lilo_definitions.definition import Definition
from lilo_definitions.gpus import GPUS, Gpu
from lilo_definitions.lora import TargetGroup
from lilo_definitions.trainer import KeepActivations

TrainerName: TypeAlias = Literal["lilo", "miles"]
"""lilo: logits in chunks, what is kept as the definition says. miles: whole logits, full recompute."""

DEFAULT_GPU = GPUS["H200"]
"""Planned for where a definition takes whatever GPU there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is planned."""

    name: str
    architecture: Architecture
    context: int
    """Tokens of the longest row."""
    tokens_per_rank: int
    """Tokens of a microbatch on one rank; at least a row's share."""
    rows_per_microbatch: int = 1
    """More than one costs copies where rows lie interleaved; the CPU trainer's case."""
    gpu: Gpu | None
    """None: CPU ranks."""
    nodes: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    dtype_bytes: int = 2
    """Of a base weight and of an activation: 2 for bfloat16, 4 for float32."""
    slots: int = 1
    """Resident adapters."""
    lora_rank: int = 32
    targets: tuple[TargetGroup, ...] = ("attn", "mlp")
    keep: KeepActivations = "input"
    offload_inputs: bool = False
    """Whether layers' inputs wait in the host's memory; on a CPU they are there anyway."""
    logprob_chunk_tokens: int = 1024
    shard_embedding: bool = True
    """Whether tensor-parallel ranks share the embedding; a measured slice held it whole."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks share out the residual stream."""
    reserved_bytes: float = 0.0
    """Of a rank's GPU, for others that share it."""

    @classmethod
    def of(cls, definition: Definition, *, context: int | None = None) -> Job:
        """A definition's job.

        Args:
            definition: what is planned.
            context: another length than the definition's; a microbatch then holds one row of it.

        Raises:
            InvalidSource: the model's sizes are neither known nor readable here.
        """
        topology = definition.topology
        share = -(-(context or definition.context) // topology.cp)
        tokens = definition.limits.max_tokens_per_rank if context is None else share
        gpu = None
        if topology.device == "cuda":
            gpu = DEFAULT_GPU if topology.gpu is None else GPUS[topology.gpu]
        return cls(
            name=definition.name,
            architecture=architecture_of(definition),
            context=context or definition.context,
            tokens_per_rank=tokens,
            rows_per_microbatch=max(1, tokens // share),
            gpu=gpu,
            nodes=topology.nodes,
            tp=topology.tp,
            cp=topology.cp,
            dp=topology.dp,
            dtype_bytes=2 if definition.dtype == "bfloat16" else 4,
            slots=definition.lora.slots,
            lora_rank=definition.lora.max_rank,
            targets=definition.lora.targets,
            keep=definition.trainer.keep_activations,
            offload_inputs=definition.trainer.offload_inputs and gpu is not None,
            logprob_chunk_tokens=definition.limits.logprob_chunk_tokens,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp

    @property
    def stream_shards(self) -> int:
        """Ranks that share the residual stream."""
        return self.tp if self.sequence_parallel else 1

    @property
    def kv_shards(self) -> int:
        """Ranks that share the key and value heads; beyond that number they are held several times."""
        return min(self.tp, self.architecture.kv_heads)

    @property
    def gathered_tokens(self) -> int:
        """Tokens whose keys and values a rank holds during attention: those of all context-parallel ranks."""
        return self.tokens_per_rank * self.cp
