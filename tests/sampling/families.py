"""Small random models of every family as the sampler's tests need them: in transformers, with adapters, as definitions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.miles_backend.random_families import MODELS, VOCAB, write_model

FAMILIES = tuple(MODELS)

ATTN = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "out_proj"]


def make_model(name: str, folder: Path) -> Any:
    """The model in transformers, saved into `folder` too."""
    from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

    write_model(folder, name)
    kind = Qwen3_5ForConditionalGeneration if "multimodal" in name else AutoModelForCausalLM
    return kind.from_pretrained(folder).eval()


def make_adapter(model: Any, name: str, folder: Path, rank: int, seed: int) -> str:
    """A PEFT folder on every linear that carries adapters, B far from zero; leaves the model as it was."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = [*ATTN, *MLP, "lm_head"] + (DELTA if MODELS[name][0] == "qwen3_5" else [])
    with warnings.catch_warnings():
        # PEFT warns that an adapter of a tied head cannot be merged (it is not), and uses deprecated names.
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, target_modules=targets))
        for key, parameter in peft.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
        peft.save_pretrained(str(folder))
        peft.unload()
    return str(folder)


def random_text(length: int, seed: int) -> list[int]:
    """Token ids that every one of these models has."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
