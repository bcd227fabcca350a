"""Peer: Hugging Face + PEFT as a user would set it up on one GPU: bf16, SDPA, torch's AdamW; optionally Liger's kernels.

Liger replaces classes of the whole process, so a process measures with it or without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lilo_definitions.architecture import Architecture
from lilo_engine.errors import InvalidRequest
from transformers import AutoConfig, AutoModelForCausalLM

from lilo_miles_backend.bench.native import LORA_RANK
from lilo_miles_backend.bench.random_model import config_of

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears that adapters act on, as PEFT names them."""


def use_liger() -> None:
    """Liger's norms, rotation, SwiGLU and fused loss in every Qwen3 of this process.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        # Optional, and only where there is a GPU.
        from liger_kernel.transformers import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
            apply_liger_kernel_to_qwen3,
        )
    except ImportError as error:
        raise InvalidRequest(
            "Liger, a peer of this measurement, is not installed: pip install liger-kernel"
        ) from error
    apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True
    )


class Peer:
    """A random model of a shape with an adapter on every linear but the head, and its optimizer."""

    def __init__(self, architecture: Architecture, layers: int, device: str) -> None:
        """Build it on the device.

        Raises:
            InvalidRequest: PEFT is not installed.
        """
        try:
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only the peer needs it
        except ImportError as error:
            raise InvalidRequest(
                "the peer of this measurement, PEFT, is not installed: pip install 'lilo-miles-backend[bench]'"
            ) from error
        self.architecture = replace(architecture, layers=layers)
        self._device = device
        config: dict[str, Any] = config_of(self.architecture)
        with torch.device(device):
            base: Any = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(config.pop("model_type"), **config),
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
            )
        lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=list(MODULES))
        self._model: Any = get_peft_model(base, lora).to(device)
        self._model.enable_input_require_grads()
        self._model.train()
        trained = [one for one in self._model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def checkpoint(self, wanted: bool) -> None:
        """Keep the layers' inputs alone, or everything."""
        if wanted:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self._model.gradient_checkpointing_disable()

    def step(self, tokens: int) -> float:
        """One random row, its loss, backward and optimizer; the loss."""
        try:
            ids = torch.randint(0, self.architecture.vocab, (1, tokens), device=self._device)
            loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            self._optimizer.step()
            return float(loss.detach())
        finally:
            self._optimizer.zero_grad(set_to_none=True)
