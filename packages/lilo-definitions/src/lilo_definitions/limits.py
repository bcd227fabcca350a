"""Limits: bounds of work and waiting, each with its unit in the name and the reason for its default."""

from __future__ import annotations

from pydantic import Field

from lilo_definitions.part import Part


class Limits(Part):
    """Bounds, each with its unit in the name."""

    max_tokens_per_rank: int = Field(gt=0)
    """Padded tokens of one microbatch on one rank; bounds activation memory."""
    max_batch_tokens: int = Field(gt=0)
    """Tokens of coalesced requests in one backend call; a larger single request runs alone. Bounds how long one
    model waits for the others."""
    max_forward_backward_batch: int | None = Field(default=None, gt=0)
    """Requests in one backend call; None = no cap. 1 where a single request already fills every rank for seconds, so
    that one failing request costs nobody else's work."""
    logprob_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose logits exist at once: 1,024 x 152k float32 are 0.6 GB, and smaller chunks starve the product."""
    max_queued_operations: int = Field(default=1024, gt=0)
    """Waiting operations of one model before submissions are refused: a client that never reads must not fill memory."""
    publication_workers: int = Field(default=2, gt=0)
    """Sampler publications that may run at once; each holds one adapter in memory."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """From starting the backend until it describes itself; reading the weights is most of it."""
    command_timeout_s: float = Field(default=600.0, gt=0)
    """For a command of any size; see `command_s_per_token`. A trainer that is silent for longer is taken for lost."""
    command_s_per_token: float = Field(default=0.01, ge=0)
    """Added per token, so that the limit scales with the work."""
    distributed_timeout_minutes: float = Field(default=30.0, gt=0)
    """Time limit of every process group of the trainer: longer than the longest collective waits for the slowest rank,
    which at 256k tokens is longer than NCCL's own 10 minutes."""
