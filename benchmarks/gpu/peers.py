"""Peers: Hugging Face + PEFT on the same shape, lengths and clock: plain or with Liger's kernels, with or without checkpointing.

Liger replaces classes of the whole process, so that the two are two runs of this case.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lilo_definitions.architecture import Architecture
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.clock import timed
from benchmarks.gpu.costs import CEILING, useful
from benchmarks.gpu.lines import emit, part
from benchmarks.gpu.models import SHAPES, config_of
from benchmarks.gpu.ours import LORA_RANK

CASE = "peers"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = (4096, 16384, 65536)


def main() -> None:
    """Both settings of checkpointing at every length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    arguments = parser.parse_args()
    if arguments.liger:
        with_liger()
    architecture = SHAPES[arguments.model]
    peer = Peer(architecture, arguments.layers, arguments.device)
    for checkpointing in (False, True):
        peer.checkpoint(checkpointing)
        words = "checkpointing" if checkpointing else "no checkpointing"
        name = f"HF + PEFT{' + Liger' if arguments.liger else ''}, {words}"
        for tokens in arguments.lengths:
            with part(CASE, f"{name}, {tokens} tokens"):
                measure(peer, name, tokens)


def with_liger() -> None:
    """Liger's norms, rotation, SwiGLU and fused loss in every Qwen3 of this process."""
    # Optional, and only where there is a GPU.
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        apply_liger_kernel_to_qwen3,
    )

    apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True
    )


class Peer:
    """The model as a user would set it up, with torch's AdamW."""

    def __init__(self, architecture: Architecture, layers: int, device: str) -> None:
        config: dict[str, Any] = config_of(architecture) | {"num_hidden_layers": layers}
        config.pop("layer_types", None)  # of as many layers as the shape had
        self.layers = layers
        self.architecture = architecture
        self.device = device
        with torch.device(device):
            base = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(config.pop("model_type"), **config),
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
            )
        lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=list(MODULES))
        self.model: Any = get_peft_model(base, lora).to(device)
        self.model.enable_input_require_grads()
        self.model.train()
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def checkpoint(self, wanted: bool) -> None:
        """Layer by layer, without re-entry."""
        if wanted:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def step(self, tokens: int) -> float:
        """One sequence, labels and optimizer."""
        try:
            ids = torch.randint(0, self.architecture.vocab, (1, tokens), device=self.device)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            return float(loss.detach())
        finally:
            self.optimizer.zero_grad(set_to_none=True)


def measure(peer: Peer, name: str, tokens: int) -> None:
    """Time one setting at one length."""
    few = tokens > 32_768
    timing = timed(lambda: peer.step(tokens), warm=1, runs=2 if few else 4, budget_s=12.0)
    layers = peer.architecture.layers
    share = peer.layers / layers
    work = useful(peer.architecture, [tokens])
    head = 4 * peer.architecture.head_weights * tokens
    speed = ((work - head) * share + head) / timing.best_s
    emit(
        CASE,
        setting=name,
        tokens=tokens,
        tok_s=tokens / timing.best_s,
        peak_gib=timing.peak_gib,
        useful_tflops=speed / 1e12,
        useful_share=speed / CEILING,
        seconds=timing.all_s,
    )


if __name__ == "__main__":
    main()
