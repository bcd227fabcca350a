"""BaseModel: the frozen base model on megatron-core, up to the hidden states that the head reads.

Not the head itself: logits are made chunk by chunk in `logprobs.py`. Adapters act inside through the `LoraLinear`
wrappers that `BaseModel` puts around Megatron's linears.

Shapes: B rows, S tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from lilo_definitions import Definition
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.families.shape import ModelShape
from lilo_miles_backend.ranks.adapter import Adapter
from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.attention import CausalAttention, PackedRows, Rotary, Running
from lilo_miles_backend.ranks.collectives import Axis
from lilo_miles_backend.ranks.device import Device
from lilo_miles_backend.ranks.dtype import compute_dtype
from lilo_miles_backend.ranks.elementwise import RMSNorm, SwiGLU
from lilo_miles_backend.ranks.logprobs import Head
from lilo_miles_backend.ranks.lora import LoraLinear, Segment
from lilo_miles_backend.ranks.megatron import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    building,
    get_gpt_layer_local_spec,
)
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.sites import HEAD_SITE, LoraSite, lora_sites
from lilo_miles_backend.ranks.stream import Stream
from lilo_miles_backend.ranks.weights import load_weights, vocabulary_rows


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
        self._running = Running()
        self._gpt = _build(self.shape, definition, device, parallel, self._running)
        load_weights(self._gpt, self.shape, folder, parallel.tp)
        for parameter in self._gpt.parameters():
            parameter.requires_grad_(False)
        self._entries = vocabulary_rows(self.shape, parallel.tp)
        self.sites: tuple[LoraSite, ...] = lora_sites(self.shape, parallel.tp.size)
        self._linears = _wrap_linears(self._gpt, self.sites, parallel.tp)

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
            tp=self.parallel.tp,
        )

    def activate(self, *adapters: tuple[Adapter, slice]) -> None:
        """Let these adapters act in the passes that follow, each on its own tokens; none: the base model alone.

        Args:
            adapters: with the tokens of the microbatch, flattened in the model's order, that each acts on.
        """
        for adapter, _ in adapters:
            adapter.refresh()
        for linear in self._linears:
            linear.segments = tuple(
                Segment(factors=adapter.factors[linear.site], tokens=tokens)
                for adapter, tokens in adapters
                if linear.site in adapter.factors
            )

    def hidden(
        self, tokens_BS: torch.Tensor, stream: Stream | None = None, *, with_grad: bool
    ) -> torch.Tensor:
        """Final hidden states [S, B, H], normalized, before the head.

        Args:
            tokens_BS: token ids, int64: right-padded rows, or [1, T] of a stream.
            stream: how packed rows lie in this rank's tokens; None: each row is a row.
            with_grad: the graph reaches down to the first layer, so that all adapters get gradients.
        """
        self._running.packed = (
            None if stream is None else PackedRows.of(stream, self.device.torch_device)
        )
        with torch.set_grad_enabled(with_grad):
            embedded_SBH = self._gpt.embedding(input_ids=tokens_BS, position_ids=None)
            if with_grad:
                # Nothing below has a gradient (the embedding is frozen); this starts the graph that the
                # adapters' own backward functions hang on.
                embedded_SBH = embedded_SBH.detach().requires_grad_()
            return cast(torch.Tensor, self._gpt.decoder(embedded_SBH, attention_mask=None))


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


def _build(
    shape: ModelShape,
    definition: Definition,
    device: Device,
    parallel: Parallel,
    running: Running,
) -> GPTModel:
    alignment = Alignment.of(definition.topology, sequence_parallel=False)
    rotary = Rotary(
        head_dim=shape.head_dim,
        base=shape.rope_theta,
        max_positions=definition.context + alignment.multiple,  # the longest row, padded
        device=device.torch_device,
    )
    config = _config(shape, parallel, compute_dtype(definition))

    def attention(**given: Any) -> CausalAttention:  # noqa: ANN401 - Megatron's own keywords
        return CausalAttention(rotary=rotary, running=running, cp=parallel.cp, **given)

    with building():
        model = GPTModel(
            config,
            # Upstream annotates ModuleSpec and takes both.
            _block_spec(shape.num_hidden_layers, attention),  # pyright: ignore[reportArgumentType]
            # Megatron cuts it evenly; entries that only pad it are never looked up, and the head leaves them out.
            vocab_size=-(-shape.vocab_size // parallel.tp.size) * parallel.tp.size,
            max_sequence_length=definition.context,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            # Positions enter in our own attention; Megatron would compute sines again in each layer.
            position_embedding_type="none",
        )
    return model.to(device.torch_device)


def _config(shape: ModelShape, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.topology.tp,
        context_parallel_size=parallel.topology.cp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        cuda_graph_scope=[],  # the default warns that its own value is deprecated
        perform_initialization=False,  # every weight is read from files; load_weights checks that
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _block_spec(
    num_layers: int, core_attention: Callable[..., CausalAttention]
) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = cast(Any, layer.submodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    # Megatron's name for "the MLP calls an activation module on the fused projection".
    parts.mlp.submodules.activation_func = SwiGLU
    attention = parts.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = core_attention
    return TransformerBlockSubmodules(
        layer_specs=[layer] * num_layers,
        layer_norm=RMSNorm,  # pyright: ignore[reportArgumentType] - builds from a class too
    )


def _wrap_linears(gpt: GPTModel, sites: Sequence[LoraSite], tp: Axis) -> list[LoraLinear]:
    linears: list[LoraLinear] = []
    for site in sites:
        if site.path is None:
            continue
        parent = gpt.get_submodule(site.path.rpartition(".")[0])
        name = site.path.rpartition(".")[2]
        linear = LoraLinear(getattr(parent, name), site, tp)
        setattr(parent, name, linear)
        linears.append(linear)
    return linears
