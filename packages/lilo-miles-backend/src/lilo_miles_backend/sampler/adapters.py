"""Adapter: the factors of one PEFT folder, fused as the base weights are.

A folder is read whole and checked whole before anything uses it: wrong shapes, modules that do not exist, numbers
that are not finite and PEFT features that the sampler does not apply are refused by name, because an adapter that is
applied in part gives answers that look right. `groups.py` applies it to the rows that use it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lilo_engine.errors import InvalidRequest
from safetensors import SafetensorError
from safetensors.torch import load_file

from lilo_miles_backend.families.linear import Linear
from lilo_miles_backend.families.shape import ModelShape
from lilo_miles_backend.sampler.weights import FUSED, HEAD, BaseWeights

_FACTOR = re.compile(
    r"base_model\.model\."
    r"(?:model\.(?:language_model\.)?layers\.(?P<layer>\d+)\.(?P<module>[\w.]+?)|(?P<head>lm_head))"
    r"\.lora_(?P<factor>[AB])\.weight"
)
_SAVED_BASE = re.compile(
    r"base_model\.model\.(?:model\.(?:language_model\.)?embed_tokens|lm_head)(?:\.base_layer)?\.weight"
)

Place = tuple[int, str]
"""(layer, fused name); (-1, "lm_head") for the head."""

HEAD_PLACE: Place = (-1, HEAD)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One loaded adapter; compared by identity, so that a running row keeps exactly the one it started with."""

    name: str
    folder: str
    factors: Mapping[Place, tuple[torch.Tensor, torch.Tensor]]
    """Per place A [r, in] and scaled B [out, r], where r is the sum over the fused parts; absent = no adapter there."""


def read_adapter(name: str, folder: str, base: BaseWeights) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        InvalidRequest: the folder is no adapter for this base model; the message says what does not fit.
    """
    path = Path(folder)
    config = _read_config(path)
    scale = _scale(path, config)
    modules = _collect(path, _read_tensors(path), base, rank=config["r"])
    factors: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, kind in enumerate(base.shape.layers):
        linears = base.shape.linears(kind)
        for fused, parts in FUSED[kind].items():
            found = [(linears[part], modules.get((layer, part))) for part in parts]
            if any(pair is not None for _, pair in found):
                factors[layer, fused] = _fuse(found, scale)
    if HEAD_PLACE in modules:
        factors[HEAD_PLACE] = _fuse([(base.shape.head, modules[HEAD_PLACE])], scale)
    placed = {
        place: (
            a.to(device=base.device, dtype=base.dtype),
            b.to(device=base.device, dtype=base.dtype),
        )
        for place, (a, b) in factors.items()
    }
    return Adapter(name, folder, placed)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((path / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{path} is no adapter folder: adapter_config.json cannot be read ({error})"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InvalidRequest(f"{path}/adapter_config.json does not describe a LORA adapter")
    return config


def _scale(path: Path, config: Mapping[str, Any]) -> float:
    """Factor on B: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv:2312.03732)."""
    unsupported = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")
    for key in unsupported:
        if config.get(key):
            raise InvalidRequest(
                f"{path}/adapter_config.json has {key} = {config[key]!r}; the embedded sampler applies plain LoRA"
            )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise InvalidRequest(f"{path}/adapter_config.json trains biases; expected bias = 'none'")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise InvalidRequest(
            f"{path}/adapter_config.json has r = {rank!r}, lora_alpha = {alpha!r}; expected numbers, r at least 1"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(
            f"{path} is no adapter folder: adapter_model.safetensors cannot be read ({error})"
        ) from error


def _collect(
    path: Path, tensors: Mapping[str, torch.Tensor], base: BaseWeights, *, rank: int
) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
    """Pair A and B per (layer, module) and check them against the base model."""
    halves: dict[Place, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _FACTOR.fullmatch(key)
        if match is None:
            _check_saved_base(path, key, tensor, base)
            continue
        place = HEAD_PLACE if match["head"] else (int(match["layer"]), match["module"])
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidRequest(f"{path}: tensor {key!r} holds values that are not finite")
        halves.setdefault(place, {})[match["factor"]] = tensor.float()
    return {place: _pair(path, place, pair, base.shape, rank) for place, pair in halves.items()}


def _pair(
    path: Path, place: Place, pair: Mapping[str, torch.Tensor], shape: ModelShape, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    layer, module = place
    known = shape.linears(shape.layers[layer]) if layer < shape.num_hidden_layers else {}
    expected = shape.head if place == HEAD_PLACE else known.get(module)
    if expected is None:
        raise InvalidRequest(
            f"{path} adapts layer {layer} {module!r}; the base model has {shape.num_hidden_layers} layers "
            f"with {', '.join(shape.linears(shape.layers[0]))}, and {HEAD}"
        )
    if len(pair) != 2:
        raise InvalidRequest(f"{path}: layer {layer} {module!r} has only lora_{next(iter(pair))}")
    a, b = pair["A"], pair["B"]
    out, width = expected.out_features, expected.in_features
    if tuple(a.shape) != (rank, width) or tuple(b.shape) != (out, rank):
        raise InvalidRequest(
            f"{path}: layer {layer} {module!r} has A {list(a.shape)} and B {list(b.shape)}; "
            f"expected A [{rank}, {width}] and B [{out}, {rank}]"
        )
    return a, b


def _check_saved_base(path: Path, key: str, tensor: torch.Tensor, base: BaseWeights) -> None:
    """PEFT stores the embedding beside an adapter of a tied lm_head: accepted if it is the base model's own."""
    if _SAVED_BASE.fullmatch(key):
        own = base.embedding if "embed_tokens" in key else base.head
        if own.shape == tensor.shape and torch.equal(own.cpu(), tensor.to(own.dtype)):
            return
        raise InvalidRequest(
            f"{path}: {key!r} is not the base model's; changed base weights are not applied"
        )
    raise InvalidRequest(f"{path}: tensor {key!r} is not a LoRA factor that this sampler knows")


def _fuse(
    parts: Sequence[tuple[Linear, tuple[torch.Tensor, torch.Tensor] | None]], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a fused projection: A stacked over rank, B block-diagonal over the parts' outputs."""
    downs: list[torch.Tensor] = []
    ups: list[torch.Tensor] = []
    for linear, pair in parts:
        a, b = pair or (torch.zeros(0, linear.in_features), torch.zeros(linear.out_features, 0))
        downs.append(a)
        ups.append(b * scale)
    return torch.cat(downs), torch.block_diag(*ups)
