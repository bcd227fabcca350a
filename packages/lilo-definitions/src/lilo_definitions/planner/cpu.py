"""Bytes of working memory on a CPU rank: what the trainer's own layer holds in each moment, counted from its backward.

What layers keep is the same as on GPUs (`activations.py`). Different are elementwise kernels, which need temporaries on a
CPU, and attention, whose kernel there has no float32 accumulators beside float32 gradients. `proofs/planner.py` measures
all of it. Names as there, in floats of the activations' type per token.
"""

from __future__ import annotations

from lilo_definitions.planner.activations import MLP_PIECE_TOKENS
from lilo_definitions.planner.job import Job
from lilo_definitions.trainer import KEEPS, Keep

_FP32 = 4
_FP64 = 8


def head_bytes(job: Job) -> float:
    """At the loss: input and output of the final norm, whose place the gradient takes; logprobs in float64."""
    return job.tokens_per_rank * (2 * job.dtype_bytes * job.architecture.hidden + 4 * _FP64)


def chunk_logits_bytes(job: Job) -> float:
    """One chunk's logits in float32, and their exponentials while they are summed."""
    chunk = min(job.logprob_chunk_tokens, job.tokens_per_rank)
    return chunk * job.architecture.vocab / job.tp * 2 * _FP32


def mlp_backward_bytes(job: Job, keep: Keep) -> float:
    """Gradients at the head, of the layer and of the norm; that of the product, and two temporaries of its backward."""
    model, level = job.architecture, KEEPS.index(keep)
    hidden, inner = model.hidden, model.inner / job.tp
    floats = hidden + 2 * hidden / job.stream_shards
    if level < KEEPS.index("attention"):
        floats += hidden / job.stream_shards + (model.qkv_width + model.attention_width) / job.tp
    piece = min(MLP_PIECE_TOKENS, job.tokens_per_rank)
    in_piece = piece * inner * (3 if keep == "all" else 5)
    return job.dtype_bytes * (job.tokens_per_rank * floats + in_piece)


def softmax_backward_bytes(job: Job, keep: Keep) -> float:
    """Gradients at the head, of the layer and of its middle; rotated queries and keys, and gradients of what is mixed.

    Less what the MLP's backward has let go of: the middle, gate and up.
    """
    model, level = job.architecture, KEEPS.index(keep)
    queries, keys = model.attention_width / job.tp, model.kv_width / job.kv_shards
    floats = model.hidden + 2 * model.hidden / job.stream_shards + 3 * queries + 3 * keys
    if level < KEEPS.index("qkv"):
        floats += model.qkv_width / job.tp
    if level < KEEPS.index("attention"):
        floats += queries
    else:
        floats -= model.hidden / job.stream_shards
    if keep == "all":
        floats -= 2 * model.inner / job.tp
    if job.cp > 1:
        floats += 2 * keys * 2 * job.cp  # keys and values of all ranks, and their gradients
    return job.tokens_per_rank * job.dtype_bytes * floats


def table_bytes(job: Job) -> float:
    """Sines and cosines of every position."""
    return job.context * job.architecture.head_dim * _FP32
