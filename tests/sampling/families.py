"""Small models of every family with random weights, in transformers and as folders."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from lilo_definitions import Definition, get

FAMILIES = ("llama", "qwen3", "qwen3_5")

COMMON = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
ATTN = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_IN_OUT = ["in_proj_qkv", "in_proj_z", "out_proj"]


def make_model(family: str, folder: Path):
    """The model in transformers, saved into `folder` too."""
    import transformers

    torch.manual_seed(7)
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    elif family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON))
    else:
        from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **DELTA))
    for name, parameter in model.named_parameters():
        _fill(name, parameter.data)
    model.save_pretrained(folder)
    return model.eval()


def _fill(name: str, values: torch.Tensor) -> None:
    """Far from what a fresh model has: norms that matter, memories of many tokens."""
    if name.endswith("A_log"):
        # transformers' own start forgets within a token, which would hide every mistake with states.
        values.uniform_(0.02, 0.6).log_()
    elif name.endswith("dt_bias"):
        values.normal_(std=0.5)
    elif "norm" in name:
        values.add_(torch.empty_like(values).normal_(std=0.2))
    elif values.ndim == 2:
        values.normal_(std=0.08)


def make_adapter(model, family: str, folder: Path, rank: int, seed: int) -> str:
    """A PEFT folder on every linear that carries adapters, B far from zero; leaves the model as it was."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = [*ATTN, *MLP, "lm_head"] + (DELTA_IN_OUT if family == "qwen3_5" else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, target_modules=targets))
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        peft.save_pretrained(str(folder))
        peft.unload()
    return str(folder)


def definition_of(family: str, folder: Path, **changes) -> Definition:
    """`tiny` with this model in it."""
    model = {"name": family, "source": str(folder), "family": family}
    return get("tiny").derive(name=f"small_{family}", model=model, **changes)
