"""The forward pass of a model with a cache and many adapters. Numbers only: no requests here.

Pre-norm decoder layers around a mixer of tokens (`softmax.py`, `delta.py`), then SwiGLU: what all families of `families/`
have in common. Axes: B rows, T new tokens per row, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from lilo_definitions.planner.sampler import STACKED_ADAPTERS
from torch.nn import functional

from lilo_miles_backend.sampler.adapters import HEAD_PLACE, Adapter
from lilo_miles_backend.sampler.cache import Cache
from lilo_miles_backend.sampler.draw import Draw, draw_tokens, stream
from lilo_miles_backend.sampler.groups import AdapterGroups
from lilo_miles_backend.sampler.mixer import rms_norm
from lilo_miles_backend.sampler.places import make_places
from lilo_miles_backend.sampler.stack import AdapterStack, StackedRows
from lilo_miles_backend.sampler.weights import BaseWeights, Layer

Acting: TypeAlias = AdapterGroups | StackedRows
"""The adapters of the rows of one pass."""

_HEAD_ROWS = 16_384
"""Rows of the head that are held in float32 at once where no product of shorter numbers is float32 itself."""


class Model:
    """The base weights, and how a row of tokens runs through them and its adapter."""

    def __init__(self, base: BaseWeights, *, stacks: bool | None = None) -> None:
        """Nothing is allocated but the RoPE frequencies.

        Args:
            base: the frozen weights.
            stacks: whether adapters of a batch are copied side by side; None: on GPUs only, where it is quicker.
        """
        self.base = base
        self._stacks = base.device.type != "cpu" if stacks is None else stacks
        self._stack = AdapterStack((), base.device)
        size = base.shape.rotary_dim
        half = torch.arange(0, size, 2, device=base.device).float()
        self._frequencies = 1.0 / base.shape.rope_theta ** (half / size)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a few tokens: what a device loads or plans at first use is done before anybody waits for it."""
        cache = self.new_cache(max_rows=2, max_length=4)
        tokens_BT = torch.zeros((2, 3), dtype=torch.int64, device=self.base.device)
        nobody = [None, None]
        self.forward(tokens_BT, [0, 0], [3, 2], cache, nobody)
        hidden_BTE = self.forward(tokens_BT[:, :1], [3, 2], [1, 1], cache, nobody)
        draw = Draw(temperature=1.0, top_k=2, top_p=0.9, stream=stream(0, 0))
        draw_tokens(self.logits(hidden_BTE[:, 0], nobody), [draw, draw])

    def new_cache(self, *, max_rows: int, max_length: int, limit_bytes: int | None = None) -> Cache:
        """A cache for this model; empty, so that it costs nothing until used."""
        return Cache(
            [layer.mixer for layer in self.base.layers],
            max_rows=max_rows,
            max_length=max_length,
            limit_bytes=limit_bytes,
        )

    def forward(
        self,
        tokens_BT: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        cache: Cache,
        adapters: Sequence[Adapter | None],
    ) -> torch.Tensor:
        """Run T tokens per row; row b's stand at positions `starts[b]` and on, in row b of the cache.

        Only the first `counts[b]` of them are real; what comes out of the others means nothing.

        Returns:
            The final hidden states after the last norm, [B, T, E].
        """
        shape = self.base.shape
        rows, width = tokens_BT.shape
        groups = self._acting(adapters)
        places = make_places(
            starts,
            counts,
            width=width,
            frequencies=self._frequencies,
            shared_by=shape.queries_per_group,
            dtype=self.base.dtype,
        )
        cache.reserve(rows, places.length)
        x = self.base.embedding[tokens_BT]
        for index, layer in enumerate(self.base.layers):
            normed = rms_norm(x, layer.input_norm, shape.rms_norm_eps)
            projected = self._linear(normed, layer, index, "in", groups)
            mixed = layer.mixer.forward(projected, places, cache.layers[index])
            x = x + self._linear(mixed, layer, index, "out", groups)
            normed = rms_norm(x, layer.post_norm, shape.rms_norm_eps)
            gate, up = self._linear(normed, layer, index, "gate_up", groups).chunk(2, dim=-1)
            x = x + self._linear(functional.silu(gate) * up, layer, index, "down", groups)
        return rms_norm(x, self.base.norm, shape.rms_norm_eps)

    def logits(self, hidden_BE: torch.Tensor, adapters: Sequence[Adapter | None]) -> torch.Tensor:
        """Logits of single positions, float32 [B, V]; one adapter per row.

        Their sums are float32 in any case: rounded to bfloat16, a logprob would be off by some hundredths.
        """
        groups = self._acting(adapters)
        return groups.add(_float_product(hidden_BE, self.base.head), hidden_BE, HEAD_PLACE)

    def _acting(self, adapters: Sequence[Adapter | None]) -> Acting:
        """How these adapters are applied, one per row: each for itself, or on a GPU side by side where they differ."""
        distinct = {adapter: None for adapter in adapters if adapter is not None}
        mixed = len(distinct) > 1 or (distinct and None in adapters)
        if not mixed or not self._stacks or len(distinct) > STACKED_ADAPTERS:
            return AdapterGroups(adapters, self.base.device)
        if not distinct.keys() <= set(self._stack.adapters):
            # What was at work before stays while there is room: prompts and rows take turns with their adapters.
            kept = {**distinct, **dict.fromkeys(self._stack.adapters)}
            self._stack = AdapterStack(list(kept)[:STACKED_ADAPTERS], self.base.device)
        return StackedRows(self._stack, adapters)

    def _linear(
        self, x_BTI: torch.Tensor, layer: Layer, index: int, fused: str, groups: Acting
    ) -> torch.Tensor:
        return groups.add(functional.linear(x_BTI, layer.fused[fused]), x_BTI, (index, fused))


def _float_product(x_BE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """X W^T in float32, whatever type the two have."""
    if x_BE.dtype == torch.float32:
        return functional.linear(x_BE, weight_VE)
    if x_BE.device.type == "cuda":
        return torch.mm(x_BE, weight_VE.T, out_dtype=torch.float32)
    wide = x_BE.float()
    parts = [functional.linear(wide, part.float()) for part in weight_VE.split(_HEAD_ROWS)]
    return torch.cat(parts, dim=-1)
