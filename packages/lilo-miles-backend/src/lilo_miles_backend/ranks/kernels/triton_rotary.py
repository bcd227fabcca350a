# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
"""Norm and rotary embedding of heads, the programs behind `TritonElementwise.rotate`. Not to be called elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _angles(cos, sin, token, feature, cos_stride, sin_stride, mask, HALF: tl.constexpr):
    """Cosine, and sine with the sign that the partner feature enters a feature with; 1 and 0 where nothing rotates."""
    rotated = mask & (feature < 2 * HALF)
    index = tl.where(feature < HALF, feature, feature - HALF)
    c = tl.load(cos + token * cos_stride + index, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + index, mask=rotated, other=0.0).to(tl.float32)
    return c, tl.where(feature < HALF, -s, s)


# The number of tokens differs from batch to batch, and must not decide which kernel is compiled.
@triton.jit(do_not_specialize=["num_tokens"])
def rotate(
    x,
    weight,
    cos,
    sin,
    y,
    num_tokens,
    heads,
    x_token,
    x_head,
    cos_stride,
    sin_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Norm where asked for, then the rotation, of some tokens of some heads."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = t.to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK_D)[None, :]
    mask = (t < num_tokens)[:, None] & (feature < D)
    # The pair of a rotated feature; of another, itself, which enters with a sine of 0.
    partner = tl.where(feature < HALF, feature + HALF, feature - HALF)
    partner = tl.where(feature < 2 * HALF, partner, feature)
    c, s = _angles(cos, sin, token, feature, cos_stride, sin_stride, mask, HALF)
    if NORM:
        w_own = tl.load(weight + feature, mask=feature < D, other=0.0).to(tl.float32)
        w_other = tl.load(weight + partner, mask=feature < D, other=0.0).to(tl.float32)
    # Several heads, for which the angles are read once.
    for index in range(HEADS):
        head = tl.program_id(1) * HEADS + index
        inside = mask & (head < heads)
        here = x + token * x_token + head * x_head
        own = tl.load(here + feature, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(here + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = (1.0 / tl.sqrt(tl.sum(own * own, 1) / D + eps))[:, None]
            own *= scale * w_own
            other *= scale * w_other
        place = y + (token * heads + head) * D + feature
        tl.store(place, (own * c + other * s).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_backward(
    grad,
    x,
    weight,
    cos,
    sin,
    out,
    num_tokens,
    heads,
    grad_token,
    grad_head,
    x_token,
    x_head,
    out_token,
    out_head,
    cos_stride,
    sin_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Gradient of the above."""
    # The transpose of a rotation is the rotation back: the sine changes its sign.
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = t.to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK_D)[None, :]
    mask = (t < num_tokens)[:, None] & (feature < D)
    partner = tl.where(feature < HALF, feature + HALF, feature - HALF)
    partner = tl.where(feature < 2 * HALF, partner, feature)
    c, s = _angles(cos, sin, token, feature, cos_stride, sin_stride, mask, HALF)
    if NORM:
        w = tl.load(weight + feature, mask=feature < D, other=0.0).to(tl.float32)
    for index in range(HEADS):
        head = tl.program_id(1) * HEADS + index
        inside = mask & (head < heads)
        here = grad + token * grad_token + head * grad_head
        own = tl.load(here + feature, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(here + partner, mask=inside, other=0.0).to(tl.float32)
        g = own * c - other * s
        if NORM:
            value = tl.load(x + token * x_token + head * x_head + feature, mask=inside, other=0.0)
            value = value.to(tl.float32)
            scale = (1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps))[:, None]
            normed = value * scale
            g *= w
            g = scale * (g - normed * (tl.sum(g * normed, 1) / D)[:, None])
        place = out + token * out_token + head * out_head + feature
        tl.store(place, g.to(out.dtype.element_ty), mask=inside)
