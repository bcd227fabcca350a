"""Bytes of activations: what each layer keeps until its backward, and what a backward works with on a GPU rank.

The form of a trainer whose frozen linears never need their input: an adapter's input is one norm or one gated product
away and is made again. Measured on one and two H200 (`proofs/planner.py` holds the rows) with a slice whose
tensor-parallel ranks shared out the residual stream, which a job says.

Names: H hidden, F inner, e bytes of an activation; q, k, v widths of all heads; all per token and rank.
"""

from __future__ import annotations

import math

from lilo_definitions.architecture import Kind
from lilo_definitions.planner.job import Job
from lilo_definitions.trainer import KEEPS, Keep

MLP_PIECE_TOKENS = 8192
"""Tokens that an MLP has at once, forward and backward: gate, up and their gradients are never there for all."""
INPUTS_HERE = 3
"""Inputs that are on the GPU where layers' inputs wait elsewhere: the first layer's, which the graph of the backward ends
in, that of the layer at work, and that of the next one."""
_DELTA_CHUNK = 64
"""Tokens of a chunk of the delta rule; each leaves a state of key_dim x value_dim per value head."""
_DELTA_PART = 4096
"""Tokens of a part of a context-parallel rank's chunk; shorter chunks are parts of their own, and count as if they were not."""
_FP32 = 4


def kept_bytes(job: Job, keep: Keep) -> float:
    """What all layers keep for the backward."""
    model = job.architecture
    kept = model.softmax_layers * layer_bytes(job, "softmax", keep)
    if model.linear is not None:
        kept += model.linear_layers * layer_bytes(job, "linear", keep)
    return kept + inputs_here_bytes(job)


def layer_bytes(job: Job, kind: Kind, keep: Keep) -> float:
    """What one layer keeps for its backward."""
    parts = _softmax_kept(job) if kind == "softmax" else _linear_kept(job)
    first = 1 if job.offload_inputs else 0
    return job.tokens_per_rank * sum(parts[first : KEEPS.index(keep) + 1])


def input_bytes(job: Job) -> float:
    """One layer's input."""
    return job.tokens_per_rank * job.dtype_bytes * job.architecture.hidden / job.stream_shards


def inputs_here_bytes(job: Job) -> float:
    """Of inputs that wait in the host's memory, what the GPU holds all the same."""
    if not job.offload_inputs:
        return 0.0
    return min(INPUTS_HERE, job.architecture.layers) * input_bytes(job)


def inputs_away_bytes(job: Job) -> float:
    """Pinned memory of the host that they take; torch rounds each layer's up to a power of two."""
    if not job.offload_inputs:
        return 0.0
    return job.architecture.layers * 2.0 ** math.ceil(math.log2(input_bytes(job)))


def _softmax_kept(job: Job) -> tuple[float, float, float, float]:
    """Of a layer with softmax attention: what each level adds: input, attention, qkv, all."""
    model, e, tp = job.architecture, job.dtype_bytes, job.tp
    stream = e * model.hidden / job.stream_shards
    # Output and float32 log-sum-exp of the attention, and the residual stream between attention and MLP.
    attention = (e * model.attention_width + _FP32 * model.heads) / tp + stream
    return stream, attention, e * _qkv_width(job), e * 2 * model.inner / tp


def _linear_kept(job: Job) -> tuple[float, float, float, float]:
    """Of a layer with linear attention."""
    model, e, tp = job.architecture, job.dtype_bytes, job.tp
    assert model.linear is not None, "a model without linear layers keeps nothing in them"
    stream = e * model.hidden / job.stream_shards
    attention = e * model.linear.value_width / tp + stream
    if job.cp > 1:
        # The states that enter parts of chunks, and the parts' maps.
        line = model.linear
        state = line.value_heads * line.key_dim * (line.key_dim + line.value_dim)
        attention += _FP32 * state / (_DELTA_PART * tp)
    return stream, attention, e * model.linear_in_width / tp, e * 2 * model.inner / tp


def _qkv_width(job: Job) -> float:
    """Features of the fused projection on one rank."""
    model = job.architecture
    queries = model.qkv_width - 2 * model.kv_width
    return queries / job.tp + 2 * model.kv_width / job.kv_shards


def softmax_backward_bytes(job: Job, keep: Keep) -> float:
    """What the backward of a softmax attention holds beyond what its layer kept, without gathered keys and values.

    Four residual streams (both norms' inputs or gradients), the projections, rotated queries and keys, output and its
    gradient, gradients of q, k and v and their float32 accumulators; less what the MLP's backward has freed.
    """
    model, e, tp = job.architecture, job.dtype_bytes, job.tp
    level = KEEPS.index(keep)
    queries, keys = model.attention_width / tp, model.kv_width / job.kv_shards
    width = 4 * e * model.hidden / job.stream_shards
    width += e * (queries + keys) + e * queries + (e + _FP32) * (queries + 2 * keys)
    if level < KEEPS.index("qkv"):
        width += e * _qkv_width(job)
    if level < KEEPS.index("attention"):
        width += e * queries
    else:
        width -= e * model.hidden / job.stream_shards
    if keep == "all":
        width -= e * 2 * model.inner / tp
    return job.tokens_per_rank * width


def linear_backward_bytes(job: Job, keep: Keep) -> float:
    """What the backward of a delta net holds beyond what its layer kept.

    Projections, convolution and their gradients (3 x), values, outputs, gates and their gradients (7 x), repeated keys,
    and the chunks' states with their gradients.
    """
    model, e, tp = job.architecture, job.dtype_bytes, job.tp
    if model.linear is None:
        return 0.0
    line = model.linear
    width = 4 * e * model.hidden / job.stream_shards
    width += e * (3 * line.conv_channels + 7 * line.value_width) / tp
    width += e * 2 * line.value_heads * line.key_dim / tp
    width += e * 2 * line.value_width * line.key_dim / (_DELTA_CHUNK * tp)
    if keep == "all":
        width -= e * 2 * model.inner / tp
    return job.tokens_per_rank * width


def mlp_backward_bytes(job: Job, keep: Keep) -> float:
    """What the backward of an MLP holds beyond what its layer kept: four streams, and the product with its gradient (of one piece), and gate and up."""
    model, e, tp = job.architecture, job.dtype_bytes, job.tp
    queries, keys = model.attention_width / tp, model.kv_width / job.kv_shards
    width = 4 * e * model.hidden / job.stream_shards
    if keep == "input":
        # Computed again for the attention's backward that follows: projections, rotated queries and keys, output.
        width += e * model.hidden / job.stream_shards + e * (_qkv_width(job) + 2 * queries + keys)
    piece = min(MLP_PIECE_TOKENS, job.tokens_per_rank)
    per_token = 2 * model.inner + (0 if keep == "all" else 2 * model.inner)
    return job.tokens_per_rank * width + piece * e * per_token / tp


def gathered_kv_bytes(job: Job) -> float:
    """Keys and values of all context-parallel ranks for one layer: gathered, and their float32 gradients."""
    if job.cp == 1:
        return 0.0
    width = 2 * job.architecture.kv_width / job.kv_shards
    return job.gathered_tokens * width * (job.dtype_bytes + _FP32)


def head_bytes(job: Job) -> float:
    """At the loss: final hidden states, their norm and gradient, whole on each rank where the vocabulary is shared out."""
    stream = job.dtype_bytes * job.architecture.hidden
    # With a stream that is shared out: its norm's input and gradient in parts, the rest whole.
    streams = 2 / job.tp + 2 if job.sequence_parallel and job.tp > 1 else 3
    return job.tokens_per_rank * stream * streams


def chunk_logits_bytes(job: Job) -> float:
    """One chunk's logits in float32 and their gradient in the activations' type."""
    chunk = min(job.logprob_chunk_tokens, job.tokens_per_rank)
    return chunk * job.architecture.vocab / job.tp * (_FP32 + job.dtype_bytes)
