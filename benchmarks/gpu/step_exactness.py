"""Exactness of a bf16 step: ours and Hugging Face's own, each against Hugging Face + PEFT in float32 on the same weights.

Then the same step again: how far repeated runs are apart (attention's backward adds up in an order of its own).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lilo_engine.operations.datum import Datum
from lilo_miles_backend.bench.native import LORA_RANK, Layout, Trainer, definition, random_datums
from lilo_miles_backend.bench.peer import MODULES

from benchmarks.gpu.lines import at_most, emit, part
from benchmarks.gpu.models import model_folder

CASE = "step_exactness"
SLACK = 1.1
"""Both are rounding of the same kind; which is nearer differs from tensor to tensor."""
ALONE = 1.5
"""For the one token that is furthest off."""


@dataclass(frozen=True)
class Found:
    """What one trainer computed."""

    logprobs: torch.Tensor
    """float64, all tokens."""
    gradients: Mapping[str, torch.Tensor]
    """By `MODULE.lora_A|B`, float64 on the CPU."""


def main() -> None:
    """Compare, print both errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with part(CASE, "a bf16 step against float32"):
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Ours twice, then both references with our factors."""
    folder, architecture = model_folder(arguments.model, arguments.layers)
    tokens = arguments.tokens
    what = definition(folder, architecture, tokens, Layout(device=arguments.device))
    datums = random_datums([tokens * 3 // 4, tokens // 4 - 3], architecture.vocab)
    with Trainer(what) as trainer:
        factors = with_random_b(trainer)
        ours = one_step(trainer, datums)
        again = one_step(trainer, datums)
    reference = hugging_face(folder, factors, datums, torch.float32, arguments.device)
    peer = hugging_face(folder, factors, datums, torch.bfloat16, arguments.device)
    for name, measure in ERRORS.items():
        mine, theirs = measure(ours, reference), measure(peer, reference)
        emit(CASE, setting=name, ours=mine, hugging_face=theirs)
        at_most(
            CASE,
            f"{name}: ours over Hugging Face's",
            mine / theirs,
            ALONE if "largest" in name else SLACK,
        )
    for name, measure in ERRORS.items():
        emit(CASE, setting=f"the same step again: {name}", ours=measure(again, ours))


def with_random_b(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Give every B numbers of a size that training reaches; a copy of all factors."""
    adapter = trainer.backend.ranks.rank.adapter(trainer.models[0])  # pyright: ignore[reportAttributeAccessIssue]
    generator = torch.Generator().manual_seed(5)
    named = adapter.named(adapter.weights)
    for name, factor in named.items():
        if name.endswith(".lora_B"):
            factor.copy_(0.01 * torch.randn(factor.shape, generator=generator))
    # What computes are copies in the model's type; restoring refreshes them.
    state = adapter.export("bench", with_optimizer=True)
    adapter.restore(state, with_optimizer=True)
    return {name: factor.detach().cpu().clone() for name, factor in named.items()}


def one_step(trainer: Trainer, datums: list[Datum]) -> Found:
    """Logprobs and gradients, which are dropped again."""
    (model_id,) = trainer.models
    (output,) = trainer.run({model_id: datums})
    adapter = trainer.backend.ranks.rank.adapter(model_id)  # pyright: ignore[reportAttributeAccessIssue]
    gradients = {
        name: part.detach().double().cpu()
        for name, part in adapter.named(adapter.gradients).items()
    }
    trainer.backend.drop_gradients(model_id)
    values = np.concatenate([one.numpy().reshape(-1) for one in output.logprobs])
    return Found(torch.from_numpy(values).double(), gradients)


def hugging_face(
    folder: Path,
    factors: Mapping[str, torch.Tensor],
    datums: list[Datum],
    dtype: torch.dtype,
    device: str,
) -> Found:
    """The usual model of this type, PEFT's adapter with these factors in float32, one call a datum."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=list(MODULES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = get_peft_model(base.to(device), lora)
    named = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    assert named.keys() == factors.keys(), "the same modules have adapters"
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(factors[name])
    logprobs: list[torch.Tensor] = []
    for datum in datums:
        ids = torch.from_numpy(datum.tokens.numpy().astype(np.int64)).to(device)
        inputs = {
            name: torch.from_numpy(t.numpy().copy()).to(device)
            for name, t in datum.loss_inputs.items()
        }
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        found = torch.log_softmax(logits, -1).gather(1, inputs["target_tokens"][:, None])[:, 0]
        (-(found * inputs["weights"]).sum()).backward()
        logprobs.append(found.detach().double().cpu())
    gradients = {name: one.grad.double().cpu() for name, one in named.items()}
    return Found(torch.cat(logprobs), gradients)


def _logprobs_max(found: Found, reference: Found) -> float:
    return float((found.logprobs - reference.logprobs).abs().max())


def _logprobs_mean(found: Found, reference: Found) -> float:
    return float((found.logprobs - reference.logprobs).abs().mean())


def _flat(found: Found) -> torch.Tensor:
    return torch.cat([found.gradients[name].reshape(-1) for name in sorted(found.gradients)])


def _gradients(found: Found, reference: Found) -> float:
    ours, theirs = _flat(found), _flat(reference)
    return float((ours - theirs).norm() / theirs.norm())


def _worst_gradient(found: Found, reference: Found) -> float:
    return max(
        float((found.gradients[name] - theirs).norm() / theirs.norm())
        for name, theirs in reference.gradients.items()
    )


ERRORS = {
    "logprobs, largest |d|": _logprobs_max,
    "logprobs, mean |d|": _logprobs_mean,
    "all LoRA gradients, |d| / |ref|": _gradients,
    "worst LoRA gradient, |d| / |ref|": _worst_gradient,
}


if __name__ == "__main__":
    main()
