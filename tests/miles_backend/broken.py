"""Faults that are put into running ranks on purpose, to see that what is compared would find them."""

from __future__ import annotations

from typing import Any, cast

import torch

from tests.miles_backend.delta_ranks import Fault, break_on_purpose

FAULTS: dict[str, tuple[str, int, int]] = {
    "gate": ("rows of q_proj left as the files have them, query and gate by turns", 1, 1),
    "heads": ("key heads of the delta nets in another order", 1, 1),
    "leak": ("state and convolution of a delta net run on into the next document", 1, 1),
    "maps": ("no map of the state between context-parallel ranks", 1, 2),
    "order": ("maps of context-parallel ranks taken in the ranks' order", 1, 2),
    "halo": ("no tokens before a chunk for the convolution", 1, 2),
}
"""What each is, and the layout (tp, cp) in which it is tried."""


def break_rank(rank: Any, fault: str) -> None:
    """Make this rank's model wrong; it ends with its process."""
    if fault not in ("gate", "heads"):
        break_on_purpose(cast(Fault, fault))
        return
    shape = rank._model.shape
    for index, kind in enumerate(shape.layers):
        layer = rank._model._gpt.decoder.layers[index]
        if kind == "softmax" and fault == "gate":
            count, size = shape.num_attention_heads, shape.head_dim
            rows = layer.in_proj[: 2 * count * size]
            rows.copy_(rows.unflatten(0, (2, count, size)).transpose(0, 1).flatten(0, 2))
        if kind == "delta" and fault == "heads":
            for weight in (layer.in_proj, layer.mixer.conv):
                _other_order(weight[: shape.delta.key_width], shape.delta.key_heads)


def _other_order(rows: torch.Tensor, heads: int) -> None:
    rows.copy_(rows.unflatten(0, (heads, -1)).flip(0).flatten(0, 1))
