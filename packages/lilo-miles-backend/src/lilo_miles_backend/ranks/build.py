"""Build: our layers inside Megatron's GPTModel, from a model's shape. No weights: `weights.py` reads them.

Megatron keeps the vocabulary's two matrices, cut over tensor-parallel ranks, and the loop over layers; a layer is
ours (`layers/layer.py`) and enters through a ModuleSpec, with the mixer of its kind. Every parameter is made on the
device at once, in the dtype it stays in; torch's meta device works too, for counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from lilo_miles_backend.families.shape import LayerKind, ModelShape
from lilo_miles_backend.ranks.attention import Attention
from lilo_miles_backend.ranks.kernels.attention_choice import choose_attention
from lilo_miles_backend.ranks.kernels.delta import delta_kernels
from lilo_miles_backend.ranks.kernels.kernels import Kernels
from lilo_miles_backend.ranks.layers.delta import DeltaMixer
from lilo_miles_backend.ranks.layers.layer import Layer, LayerSizes, Running
from lilo_miles_backend.ranks.layers.mixer import Mixer
from lilo_miles_backend.ranks.layers.norm import FinalNorm
from lilo_miles_backend.ranks.layers.softmax import SoftmaxMixer
from lilo_miles_backend.ranks.layers.stream_shards import StreamShards
from lilo_miles_backend.ranks.megatron import (
    GPTModel,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    building,
)
from lilo_miles_backend.ranks.parallel import Parallel
from lilo_miles_backend.ranks.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """What the parts of one rank's model are made from."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel
    kernels: Kernels
    max_positions: int
    """Of the longest row, with its padding."""


def build(given: Building, running: Running) -> GPTModel:
    """The model of one rank, its weights allocated and not filled; `running` will say what its layers run."""
    shape, tp = given.shape, given.parallel.tp.size
    mixers = _mixers(given)
    layers = [
        ModuleSpec(
            module=Layer,
            params={
                "sizes": _sizes(given, kind),
                "make_mixer": mixers[kind],
                "kernels": given.kernels,
                "shards": StreamShards(given.parallel.tp),
                "running": running,
            },
        )
        for kind in shape.layers
    ]
    norm = ModuleSpec(module=FinalNorm, params={"elementwise": given.kernels.elementwise})
    with building(), given.device:
        return GPTModel(
            _config(given),
            # Upstream annotates ModuleSpec and takes both.
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),  # pyright: ignore[reportArgumentType]
            # Megatron cuts it evenly; entries that only pad it are never looked up, and the head leaves them out.
            vocab_size=-(-shape.vocab_size // tp) * tp,
            max_sequence_length=given.max_positions,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            # Positions enter in the mixers; Megatron would compute sines again in each layer.
            position_embedding_type="none",
        ).requires_grad_(requires_grad=False)


def layers_of(model: GPTModel) -> list[Layer]:
    """The model's layers, the first one first."""
    return [cast(Layer, layer) for layer in model.decoder.layers]


def _mixers(given: Building) -> dict[LayerKind, Callable[[], Mixer]]:
    """How to make a mixer of each kind that the model has."""
    makers: dict[LayerKind, Callable[[], Mixer]] = {}
    if "softmax" in given.shape.layers:
        makers["softmax"] = _softmax(given)
    if "delta" in given.shape.layers:
        makers["delta"] = _delta(given)
    return makers


def _delta(given: Building) -> Callable[[], Mixer]:
    sizes, kernels = given.shape.delta, delta_kernels(given.device)
    assert sizes is not None, "a model with delta layers has their sizes"

    def make() -> Mixer:
        return DeltaMixer(
            shape=sizes,
            kernels=kernels,
            eps=given.shape.rms_norm_eps,
            dtype=given.dtype,
            tp=given.parallel.tp,
            cp=given.parallel.cp,
        )

    return make


def _softmax(given: Building) -> Callable[[], Mixer]:
    shape, tp = given.shape, given.parallel.tp.size
    rotary = Rotary(
        rotary_dim=shape.rotary_dim,
        base=shape.rope_theta,
        max_positions=given.max_positions,
        device=given.device,
    )
    attention = Attention(
        choose_attention(
            given.device,
            given.dtype,
            head_dim=shape.head_dim,
            sharing=shape.num_attention_heads // shape.num_key_value_heads,
        ),
        given.parallel.cp,
    )

    def make() -> Mixer:
        return SoftmaxMixer(
            heads=shape.num_attention_heads // tp,
            groups=shape.num_key_value_heads // tp,
            head_dim=shape.head_dim,
            rotary=rotary,
            attention=attention,
            elementwise=given.kernels.elementwise,
            dtype=torch.float32,
            eps=shape.rms_norm_eps,
            qk_norm=shape.qk_norm,
            gated=shape.output_gate,
        )

    return make


def _sizes(given: Building, kind: LayerKind) -> LayerSizes:
    shape, tp = given.shape, given.parallel.tp
    linears = shape.linears(kind)
    into = [linear for name, linear in linears.items() if not name.startswith("mlp.")]
    return LayerSizes(
        hidden=shape.hidden_size,
        projected=sum(linear.out_features for linear in into if linear.cut == "out") // tp.size,
        mixed=sum(linear.in_features for linear in into if linear.cut == "in") // tp.size,
        inner=shape.intermediate_size // tp.size,
        eps=shape.rms_norm_eps,
        dtype=given.dtype,
    )


def _config(given: Building) -> TransformerConfig:
    """What Megatron itself reads: sizes of the vocabulary's matrices, and no kernel that needs CUDA."""
    shape, topology = given.shape, given.parallel.topology
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=topology.tp,
        context_parallel_size=topology.cp,
        params_dtype=given.dtype,
        pipeline_dtype=given.dtype,
        bf16=given.dtype == torch.bfloat16,
        # "On the CPU" is on torch's default device, which is ours here; otherwise Megatron asks for CUDA by name.
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
