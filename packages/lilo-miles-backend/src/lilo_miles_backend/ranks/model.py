"""BaseModel: the frozen base model on megatron-core, up to the hidden states that the head reads.

Not the head itself: logits are made chunk by chunk in `logprobs.py`. Adapters act inside its layers (`layers/`).

Shapes: T tokens of this rank's part of a stream, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from lilo_definitions import Definition
from lilo_definitions.trainer import Keep
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.families.shape import ModelShape
from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.attention import PackedRows
from lilo_miles_backend.ranks.build import Building, build, layers_of
from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.dtype import compute_dtype
from lilo_miles_backend.ranks.kernels.choose import kernels_of
from lilo_miles_backend.ranks.kernels.kernels import Optimizer
from lilo_miles_backend.ranks.kernels.short_segments import Segments
from lilo_miles_backend.ranks.layers.layer import Active, Layer, Running
from lilo_miles_backend.ranks.layers.offload import OffloadedInputs
from lilo_miles_backend.ranks.layers.softmax import SoftmaxMixer
from lilo_miles_backend.ranks.layers.stream_shards import StreamShards
from lilo_miles_backend.ranks.logprobs import Head
from lilo_miles_backend.ranks.lora import Segment
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.side_stream import SideStream
from lilo_miles_backend.ranks.sites import HEAD_SITE, LoraSite, lora_sites
from lilo_miles_backend.ranks.stream import Stream
from lilo_miles_backend.ranks.weights import Origin, load_weights, vocabulary_rows


class BaseModel:
    """The frozen model of one rank, and the places where an adapter can act."""

    def __init__(
        self, definition: Definition, folder: Path, device: Device, parallel: Parallel
    ) -> None:
        """Build the model and read its weights from `folder`.

        Raises:
            InvalidRequest: the files do not fit the definition or this trainer.
        """
        self.shape = read_shape(folder)
        _check_fits(definition, self.shape, folder)
        self.device = device
        self.parallel = parallel
        alignment = Alignment.of(definition.topology, sequence_parallel=False)
        self._running = Running(inputs=_offloaded(definition, self.shape, device, parallel))
        self._shards = StreamShards(parallel.tp)
        kernels = kernels_of(device.torch_device)
        self._kernels = kernels
        self._gpt = build(
            Building(
                shape=self.shape,
                dtype=compute_dtype(definition),
                device=device.torch_device,
                parallel=parallel,
                kernels=kernels,
                max_positions=definition.context + alignment.multiple,
            ),
            self._running,
        )
        self._layers = layers_of(self._gpt)
        self.origin: Origin = load_weights(self._gpt, self.shape, folder, parallel.tp)
        """For writing the same files again."""
        self._entries = vocabulary_rows(self.shape, parallel.tp)
        self.sites: tuple[LoraSite, ...] = lora_sites(self.shape, parallel.tp)
        for site in self.sites:
            if site.path is not None:
                layer, _, name = site.path.rpartition(".")
                cast(Layer, self._gpt.get_submodule(layer)).linears[name].parts = site.parts

    @property
    def attention(self) -> str:
        """The kernels that the softmax layers attend with; empty where there are none."""
        mixers = (layer.mixer for layer in self._layers)
        return next((one.kernels for one in mixers if isinstance(one, SoftmaxMixer)), "")

    @property
    def optimizer(self) -> Optimizer:
        """The device's kernels for a step."""
        return self._kernels.optimizer

    @property
    def head_weight(self) -> torch.Tensor:
        """[entries of this rank, H]: the output layer's weight, or the embedding's when they are tied."""
        tied = self.shape.tie_word_embeddings
        holder = self._gpt.embedding.word_embeddings if tied else self._gpt.output_layer
        weight = cast(torch.Tensor, holder.weight)
        return weight[: self._entries.stop - self._entries.start]

    def head(self, adapter: Adapter, chunk_tokens: int) -> Head:
        """The output layer as this rank holds it, with an adapter's factors for it."""
        return Head(
            weight_VH=self.head_weight,
            factors=adapter.factors.get(HEAD_SITE),
            chunk_tokens=chunk_tokens,
            first_entry=self._entries.start,
            kernels=self._kernels.logits,
            tp=self.parallel.tp,
        )

    def activate(self, *adapters: tuple[Adapter, slice]) -> None:
        """Let these adapters act in the passes that follow, each on its own tokens; none: the base model alone.

        Args:
            adapters: with the tokens of the microbatch that each acts on.
        """
        for adapter, _ in adapters:
            adapter.refresh()
        for index, layer in enumerate(self._layers):
            layer.active = Active(
                **{
                    linear: Segments(
                        Segment(factors=adapter.factors[site], tokens=tokens)
                        for adapter, tokens in adapters
                        if (site := f"decoder.layers.{index}.{linear}") in adapter.factors
                    )
                    for linear in layer.linears
                }
            )

    def keep(self, levels: Sequence[Keep]) -> None:
        """Let each layer keep for the backward what its level says, in the passes that follow."""
        for layer, level in zip(self._layers, levels, strict=True):
            layer.level = level

    @property
    def levels(self) -> tuple[Keep, ...]:
        """What each layer keeps, the first one first."""
        return tuple(layer.level for layer in self._layers)

    def hidden(self, tokens_1T: torch.Tensor, stream: Stream, *, with_grad: bool) -> torch.Tensor:
        """Final hidden states [T, H], normalized, before the head; in their backward ranks' partial gradients are summed.

        Args:
            tokens_1T: token ids, int64.
            stream: how rows lie in this rank's tokens.
            with_grad: the graph reaches down to the first layer, so that all adapters get gradients.
        """
        self._running.rows = PackedRows.of(stream, self.device.torch_device)
        if self._running.inputs is not None:
            self._running.inputs.begin()
        num_tokens = tokens_1T.shape[1]
        with torch.set_grad_enabled(with_grad):
            embedded_T1H = self._gpt.embedding(input_ids=tokens_1T, position_ids=None)
            # Nothing below has a gradient (the embedding is frozen); here starts the graph that the adapters' own
            # backward functions hang on.
            x_t1H = self._shards.own(embedded_T1H.detach().squeeze(1)).unsqueeze(1)
            hidden_t1H = self._gpt.decoder(x_t1H.requires_grad_(with_grad), attention_mask=None)
            return self._shards.gathered(hidden_t1H.squeeze(1), num_tokens)


def _offloaded(
    definition: Definition, shape: ModelShape, device: Device, parallel: Parallel
) -> OffloadedInputs | None:
    """Where layers' inputs wait, if the definition sends them away."""
    if not definition.trainer.offload_inputs:
        return None
    tokens = -(-definition.limits.max_tokens_per_rank // parallel.tp.size)
    size = tokens * shape.hidden_size * compute_dtype(definition).itemsize
    return OffloadedInputs(SideStream(device.torch_device), usual_bytes=size)


def _check_fits(definition: Definition, shape: ModelShape, folder: Path) -> None:
    model, positions = definition.model, shape.max_position_embeddings
    equal = (
        ("model.family", model.family, shape.family),
        ("model.vocab_size", model.vocab_size, shape.vocab_size),
    )
    wrong = [
        f"{name} is {ours} in the definition and {theirs} in {folder / 'config.json'}"
        for name, ours, theirs in equal
        if ours != theirs
    ]
    wrong += [
        f"{name} {tokens} is over the model's {positions} positions"
        for name, tokens in (("model.context", model.context), ("context", definition.context))
        if tokens > positions
    ]
    tp = definition.topology.tp
    wrong += [
        f"topology.tp {tp} does not divide {name} {count}"
        for name, count in shape.divisors.items()
        if count % tp
    ]
    if -(-shape.vocab_size // tp) * (tp - 1) >= shape.vocab_size:
        wrong.append(f"topology.tp {tp} leaves a rank without any of {shape.vocab_size} tokens")
    if wrong:
        raise InvalidRequest(f"definition {definition.name!r} does not fit: {'; '.join(wrong)}")
