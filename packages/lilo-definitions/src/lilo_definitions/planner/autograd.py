"""Bytes of activations on a CPU rank: what torch's autograd keeps of the trainer's own modules.

The CPU trainer computes nothing twice: each adapter's function keeps its input, each norm and the gated product theirs, and
attention its queries, keys, values and output. Counted from the trainer's modules, in floats of the activations' type;
`proofs/planner.py` measures it.

Tensor-parallel ranks share out heads, MLP columns and the vocabulary; the residual stream is whole on each, since a CPU's
ranks have no sequence parallelism. Context-parallel ranks also keep the keys and values that they gathered.

Names: H hidden, F inner, q and k widths of all query and key heads, r LoRA rank; all per token.
"""

from __future__ import annotations

from lilo_definitions.planner.job import Job

_FP32 = 4
_FP64 = 8


def kept_bytes(job: Job) -> float:
    """What all layers keep until the backward."""
    return job.tokens_per_rank * job.architecture.layers * _layer_width(job)


def _layer_width(job: Job) -> float:
    """Bytes of one layer and token."""
    model, e, r = job.architecture, job.dtype_bytes, job.lora_rank
    h, f = model.hidden, model.inner / job.tp
    q, k = model.attention_width / job.tp, model.kv_width / job.kv_shards
    # Two inputs of norms, the projections (their slices are the norms' inputs and the values), rotated queries and
    # keys, the attention's output, gate and up.
    floats = 2 * h + (q + 2 * k) + (q + k) + q + 2 * f
    if job.cp > 1:
        floats += 2 * k * job.cp  # keys and values of all ranks
    if job.rows_per_microbatch > 1:
        floats += q  # the output copied from row-major to token-major order
    if "attn" in job.targets:
        floats += h + 4 * r  # the norm's output, and A's products for q, k, v and o
    if "mlp" in job.targets:
        floats += (
            h + f + 3 * r
        )  # the norm's output, the gated product, A's products for gate, up and down
    heads = model.heads + (model.heads + model.kv_heads if model.qk_norm else 0)
    return e * floats + _FP32 * (2 + heads / job.tp)  # log-sum-exp and the norms' inverses


def head_bytes(job: Job) -> float:
    """At the loss: input and output of the final norm, a copy without padding, its gradient; logprobs in float64."""
    return job.tokens_per_rank * (4 * job.dtype_bytes * job.architecture.hidden + 4 * _FP64)


def chunk_logits_bytes(job: Job) -> float:
    """One chunk's logits in float32, and their exponentials while they are summed."""
    chunk = min(job.logprob_chunk_tokens, job.tokens_per_rank)
    return chunk * job.architecture.vocab / job.tp * 2 * _FP32


def backward_bytes(job: Job) -> float:
    """What the backward of one layer holds beyond what is kept: the gradients of gate, up, product and stream."""
    model = job.architecture
    return job.tokens_per_rank * job.dtype_bytes * (4 * model.inner / job.tp + 2 * model.hidden)


def table_bytes(job: Job) -> float:
    """Sines and cosines of every position."""
    return job.context * job.architecture.head_dim * 2 * _FP32
