"""transformers' own count of a model's parameters, on the meta device: no memory, no weights. Shared with a proof."""

from __future__ import annotations

import torch
from lilo_definitions import Architecture
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def count(model: Architecture) -> int:
    """Parameters of the model that transformers builds from these sizes; tied ones once."""
    return sum(parameter.numel() for parameter in build(model).parameters())


def build(model: Architecture) -> PreTrainedModel:
    """transformers' model of these sizes, without memory."""
    with torch.device("meta"):
        built = _build(model)
        built.tie_weights()
    return built


def _build(model: Architecture) -> PreTrainedModel:
    sizes = {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.tied,
    }
    if model.family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if model.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    return _hybrid(sizes, model)


def _hybrid(sizes: dict[str, object], model: Architecture) -> PreTrainedModel:
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    assert model.linear is not None
    line = model.linear
    config: PretrainedConfig = Qwen3_5TextConfig(
        **sizes,
        linear_num_key_heads=line.key_heads,
        linear_num_value_heads=line.value_heads,
        linear_key_head_dim=line.key_dim,
        linear_value_head_dim=line.value_dim,
        linear_conv_kernel_dim=line.conv_kernel,
    )
    return Qwen3_5ForCausalLM(config)
