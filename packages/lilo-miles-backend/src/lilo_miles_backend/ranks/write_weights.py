"""WriteWeights: a model's parameters as Hugging Face safetensors again, the way back of `weights.py`.

One tensor at a time, of which every tensor-parallel rank sends its part to all and the first one writes; files are
closed when they are large enough, so that no more than one file is in memory.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from lilo_miles_backend.families.shape import ModelShape
from lilo_miles_backend.ranks.collectives import ALONE, Axis, stacked
from lilo_miles_backend.ranks.weights import Origin, Placement, held_part, placements

FILE_BYTES = 4 << 30
"""A file is closed when it holds this much."""


def write_weights(
    model: torch.nn.Module,
    shape: ModelShape,
    folder: Path,
    origin: Origin,
    tp: Axis = ALONE,
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `folder/model-*.safetensors` and their index, bit for bit what `origin` was read from if nothing changed.

    Called by every rank of `tp`; its first rank writes. What the model leaves out (vision, prediction layers) is not
    there, and `config.json` is not written.
    """
    parameters = dict(model.named_parameters())
    files = _Files(folder, file_bytes) if tp.rank == 0 else None
    for one in placements(shape, tp):
        part = held_part(parameters[one.parameter].detach(), one, shape, tp)
        whole = _whole(part, one, shape, tp)
        if one.plus_one:
            whole = whole.double() - 1 + origin.rests.get(one.source, 0.0)
        if files is not None:
            files.add(one.source, whole.to(origin.dtypes[one.source]))
    if files is not None:
        files.close()


def _whole(part: torch.Tensor, one: Placement, shape: ModelShape, tp: Axis) -> torch.Tensor:
    """The tensor as it lies in the files, on the CPU, from what all ranks hold of it."""
    size = shape.tensors[one.source]
    if not one.sections:
        return part.cpu().reshape(size)
    pieces = [one.ranges(rank, tp.size) for rank in range(tp.size)]
    counts = [sum(stop - start for start, stop in ranges) for ranges in pieces]
    per_index = math.prod(size) // size[one.dim]
    flat = part.new_zeros(max(counts) * per_index)
    flat[: part.numel()] = part.reshape(-1)
    whole = torch.empty(size, dtype=part.dtype)
    for row, ranges, count in zip(stacked(flat, tp).cpu(), pieces, counts, strict=True):
        shaped = list(size)
        shaped[one.dim] = count
        held, here = row[: count * per_index].view(shaped), 0
        for start, stop in ranges:
            length = stop - start
            whole.narrow(one.dim, start, length).copy_(held.narrow(one.dim, here, length))
            here += length
    return whole


class _Files:
    """The files of one folder, in the order in which tensors come."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._total = 0
        self._places: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; may write a file."""
        self._waiting[name] = tensor.contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= self._file_bytes:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the index last: without it the folder is no model."""
        self._flush()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._places}
        path = self._folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")

    def _flush(self) -> None:
        if not self._waiting:
            return
        name = f"model-{len(set(self._places.values())) + 1:05d}.safetensors"
        save_file(self._waiting, self._folder / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(self._waiting, name)
        self._total += self._bytes
        self._waiting, self._bytes = {}, 0
