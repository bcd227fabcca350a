"""AdapterState: one adapter outside its slot: what a capture freezes, a checkpoint holds and a load puts back.

Names are slot-free and those of the Hugging Face module: `model.layers.0.self_attn.q_proj.lora_A`,
`...lora_B`, `lm_head.lora_A`. Tensors are float32 on the CPU, detached: A is [lora_rank, in], B is [out, lora_rank],
or this rank's part of that: see `shards.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lilo_engine.errors import CommandFailed
from lilo_engine.operations.operation import LoraSpec

from lilo_miles_backend.shards import FactorShard

if TYPE_CHECKING:
    import torch


PARTS = ("weights", "exp_avg", "exp_avg_sq")
"""Fields of a state that hold tensors, all by the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """Everything needed to go on training an adapter elsewhere: all of it, or what one rank has of it."""

    base_model: str
    spec: LoraSpec
    optimizer_step: int
    """Steps done; Adam's bias correction uses it."""
    weights: Mapping[str, torch.Tensor]
    exp_avg: Mapping[str, torch.Tensor]
    """First moments, same names and shapes as `weights`."""
    exp_avg_sq: Mapping[str, torch.Tensor]
    """Second moments."""
    shards: Mapping[str, FactorShard] = field(default_factory=dict[str, FactorShard])
    """Which part of the whole a tensor is, by name; the moments are that of theirs. One that is not named is whole; one
    that is named and is not in `weights` is another rank's to keep."""

    def shard(self, name: str) -> FactorShard:
        """Which part of the whole the tensor of this name is."""
        rows, columns = self.weights[name].shape
        return self.shards.get(name) or FactorShard(full=(rows, columns))

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the whole tensors, by name."""
        return {name: self.shard(name).full for name in self.weights}


def flat_tensors(state: AdapterState) -> dict[str, torch.Tensor]:
    """All tensors of a state by `PART.NAME`."""
    flat: dict[str, torch.Tensor] = {}
    for part in PARTS:
        tensors: Mapping[str, torch.Tensor] = getattr(state, part)
        flat |= {f"{part}.{name}": tensor for name, tensor in tensors.items()}
    return flat


def tensors_by_part(flat: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The reverse of `flat_tensors`."""
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in PARTS}
    for key, tensor in flat.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    return parts


def assemble(parts: Sequence[AdapterState]) -> AdapterState:
    """The whole adapter from what ranks hold; replicas may be among them.

    Raises:
        CommandFailed: nobody holds some part of it; names the tensors.
    """
    first = parts[0]
    missing = [
        text
        for name, full in first.shapes.items()
        if (text := uncovered(name, full, [p.shard(name) for p in parts if name in p.weights]))
    ]
    if missing:
        raise CommandFailed(
            f"the adapter is not whole over {len(parts)} parts: {'; '.join(missing[:3])}"
            + (f"; and {len(missing) - 3} more tensors" if len(missing) > 3 else "")
        )
    return replace(first, shards={}, **{part: _joined(parts, part) for part in PARTS})


def uncovered(name: str, full: tuple[int, int], held: Iterable[FactorShard]) -> str | None:
    """What of a tensor nobody holds, in words; None if all of it is there. Pure."""
    blocks = sorted({(block.offsets, block.shape) for part in held for block in part.blocks})
    if (total := sum(shape[0] * shape[1] for _, shape in blocks)) == full[0] * full[1]:
        return None
    where = ", ".join(f"{list(shape)} at {list(offsets)}" for offsets, shape in blocks) or "nothing"
    return f"of {name} {list(full)} there is {where} ({total} of {full[0] * full[1]} elements)"


def _joined(parts: Sequence[AdapterState], kind: str) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for part in parts:
        tensors: Mapping[str, torch.Tensor] = getattr(part, kind)
        for name, tensor in tensors.items():
            shard = part.shard(name)
            if shard.dim is None:
                out.setdefault(name, tensor)
            else:
                if name not in out:
                    out[name] = tensor.new_empty(shard.full)
                out[name][shard.index] = tensor
    return out
