"""Sampler snapshots: an adapter as a PEFT folder, which PEFT, vLLM, SGLang and the embedded sampler load.

A1 `model.layers.0.self_attn.q_proj.lora_A` becomes `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`:
without the prefix PEFT ignores a tensor with a warning and answers with the base model.
"""

from __future__ import annotations

import json
import logging

import torch
from lilo_engine.commands.command import Destination, Published
from lilo_engine.errors import CommandFailed
from lilo_volume import Attempt, Group, Volume

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.checkpoints.publication import ONE_RANK, publish
from lilo_miles_backend.checkpoints.safetensors_file import write_safetensors

ADAPTER_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PREFIX = "base_model.model."
_A, _B = ".lora_A", ".lora_B"
_LOG = logging.getLogger(__name__)


def persist_sampler(
    volume: Volume,
    group: Group,
    state: AdapterState,
    destination: Destination,
    *,
    node: str | None = None,
) -> Published:
    """Publish `state` for sampling; called by every rank, written by rank 0, which holds the whole adapter.

    `node` is as in `publication.publish`. What is published can be read at once where it was written.

    Raises:
        InvalidRequest: the name is taken and `destination.overwrite` is not set.
        CommandFailed: the adapter is empty or not whole, or it could not be published.
    """

    def write(attempt: Attempt) -> set[str] | None:
        if group.rank != 0:
            return None
        tensors, config = peft_tensors(state), peft_config(state)
        with attempt.create(ADAPTER_NAME) as file:
            write_safetensors(file, tensors, {"format": "pt"})
        with attempt.create(CONFIG_NAME) as file:
            file.write(json.dumps(config, indent=2, sort_keys=True).encode())
        return {ADAPTER_NAME, CONFIG_NAME}

    return publish(volume, group, state, destination, layout=ONE_RANK, write=write, node=node)


def peft_tensors(state: AdapterState) -> dict[str, torch.Tensor]:
    """The adapter under PEFT's names; A [lora_rank, in], B [out, lora_rank], float32, contiguous.

    Raises:
        CommandFailed: there are none, or a module has only one of its two.
    """
    modules = _modules(state)
    out: dict[str, torch.Tensor] = {}
    for module in modules:
        for half in (_A, _B):
            tensor = state.weights[module + half].detach()
            out[f"{_PREFIX}{module}{half}.weight"] = tensor.to(torch.float32).contiguous()
    if state.optimizer_step > 0 and not any(state.weights[m + _B].any() for m in modules):
        _LOG.warning(
            "the adapter of %s has only zeros in lora_B after %d steps; it samples as the base model",
            state.base_model,
            state.optimizer_step,
        )
    return out


def peft_config(state: AdapterState) -> dict[str, object]:
    """`adapter_config.json`; `target_modules` names exactly the kinds of linears that carry the adapter."""
    alpha = float(state.spec.alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": state.base_model,
        "inference_mode": True,
        "r": state.spec.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": sorted({module.rpartition(".")[2] for module in _modules(state)}),
    }


def _modules(state: AdapterState) -> list[str]:
    """Names of the linears that carry the adapter, sorted."""
    modules = sorted({name.removesuffix(_A).removesuffix(_B) for name in state.weights})
    if not modules:
        raise CommandFailed(
            "the adapter has no tensors; an empty snapshot would sample as the base model"
        )
    halves = {module + half for module in modules for half in (_A, _B)}
    if different := sorted(halves ^ state.weights.keys()):
        raise CommandFailed(
            f"the adapter is not whole: {', '.join(different[:3])} has no counterpart"
        )
    return modules
