"""Small random models of every family as Hugging Face folders, with the definitions that train them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lilo_definitions import Definition, get

VOCAB = 97
CONTEXT = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
}
DENSE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
HYBRID: dict[str, Any] = {
    **SIZES,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 0, 0],
    },
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DENSE, tie_word_embeddings=True))


def _qwen3() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DENSE, tie_word_embeddings=False))


def _qwen3_5() -> torch.nn.Module:
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID, tie_word_embeddings=False))


def _multimodal() -> torch.nn.Module:
    from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**HYBRID, "tie_word_embeddings": True}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    return Qwen3_5ForConditionalGeneration(config)


MODELS: dict[str, tuple[str, Callable[[], torch.nn.Module]]] = {
    "llama": ("llama", _llama),
    "qwen3": ("qwen3", _qwen3),
    "qwen3_5": ("qwen3_5", _qwen3_5),
    "qwen3_5 multimodal": ("qwen3_5", _multimodal),
}
"""The family of a definition and transformers' model, by name."""


def write_model(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Definition:
    """Write a random model of this name into `folder`, its files in `dtype`; what trains it, in float32."""
    family, make = MODELS[name]
    torch.manual_seed(3)
    model = make().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _spread(key, parameter)
    model.to(dtype).save_pretrained(folder)  # pyright: ignore[reportCallIssue] - a PreTrainedModel
    tiny = get("tiny")
    return tiny.model_copy(
        update={
            "name": folder.name,
            "context": CONTEXT,
            "model": tiny.model.model_copy(
                update={
                    "name": folder.name,
                    "source": str(folder),
                    "family": family,
                    "vocab_size": VOCAB,
                    "context": CONTEXT,
                }
            ),
        }
    )


def _spread(key: str, parameter: torch.Tensor) -> None:
    """Numbers in which errors show: spread logits, norms that are not one, states that last tens of tokens."""
    if key.endswith("A_log"):
        # transformers' own start forgets within a token, which hides whether states are passed on at all.
        parameter.copy_(torch.empty_like(parameter).uniform_(0.02, 0.6).log())
    elif key.endswith("dt_bias"):
        parameter.copy_(torch.randn_like(parameter) - 1)
    elif parameter.dim() == 1:
        parameter.add_(0.1 * torch.randn_like(parameter))
    else:
        parameter.mul_(3.0)
