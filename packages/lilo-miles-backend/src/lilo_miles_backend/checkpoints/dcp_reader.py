"""DCP reader: `.metadata` without trusting it, and tensors out of the files it names.

`.metadata` is a pickle, and a pickle can run code. So it is read only after its digest was checked, through an
unpickler that knows the dozen names a real one uses, and what it says is checked before a tensor is touched.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from lilo_engine.errors import CommandFailed
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] - the record of a file slice
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lilo_miles_backend.checkpoints.planners import ShardLoadPlanner
from lilo_miles_backend.shards import FactorShard

_CLASSES: Mapping[tuple[str, str], object] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,  # pyright: ignore[reportPrivateUsage]
    ("torch", "Size"): torch.Size,
    ("torch", "float32"): torch.float32,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # pyright: ignore[reportPrivateUsage]
}
"""Everything that a `.metadata` of float32 tensors refers to; none of it does more than hold values."""

MAX_ELEMENTS = 2**31
"""In one tensor of an adapter; more is refused before memory is taken for it."""


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> object:
        try:
            return _CLASSES[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it refers to {module_name}.{global_name}, which no checkpoint of an adapter needs"
            ) from None


def parse_metadata(data: bytes, label: str, sizes: Mapping[str, int]) -> Metadata:
    """Read `.metadata` and check it against the files there are (bytes by path).

    Raises:
        CommandFailed: it is no such file, or says something that cannot be true.
    """
    try:
        found = _AllowListUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise CommandFailed(f"{label}: .metadata is refused: {error}") from error
    if not isinstance(found, Metadata):
        raise CommandFailed(f"{label}: .metadata is refused: it is {type(found).__name__}")
    try:
        fault = _fault(found, sizes)
    except (AttributeError, TypeError, ValueError) as error:  # a field of another type
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise CommandFailed(f"{label}: .metadata is refused: {fault}")
    return found


def shapes_of(found: Metadata) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, by its name in the state dict."""
    tensors = found.state_dict_metadata.items()
    return {
        key: tuple(item.size) for key, item in tensors if isinstance(item, TensorStorageMetadata)
    }


def load_tensors(
    folder: Path, found: Metadata, wanted: Mapping[str, FactorShard]
) -> dict[str, torch.Tensor]:
    """Read the tensors of these names, float32 on the CPU: the part of each that is wanted, whatever layout wrote it.

    Raises:
        CommandFailed: a file does not hold what `.metadata` says.
    """
    state = {name: torch.empty(shard.shape, dtype=torch.float32) for name, shard in wanted.items()}
    planner, reader = ShardLoadPlanner(wanted), FileSystemReader(folder)
    try:
        planner.set_up_planner(state, found, True)
        reader.set_up_storage_reader(found, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (AssertionError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CommandFailed(f"the shards in {folder} cannot be read: {error}") from error
    return state


def _fault(found: Metadata, sizes: Mapping[str, int]) -> str | None:
    """Why `found` cannot be believed; types are checked too, since a pickle may put anything anywhere."""
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(found.storage_data, dict):
        return "its tables are no tables"
    for name, tensor in found.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
            return f"{name!r} is no tensor"
        if tensor.properties.dtype != torch.float32:
            return f"{name} is {tensor.properties.dtype}, expected float32"
        if not isinstance(tensor.size, torch.Size) or not 0 < tensor.size.numel() <= MAX_ELEMENTS:
            return f"{name} has the impossible shape {tensor.size!r}"
        if not _tiles(tensor):
            return f"the pieces of {name} do not make up its shape {list(tensor.size)}"
        if any(
            (MetadataIndex(name, chunk.offsets)) not in found.storage_data
            for chunk in tensor.chunks
        ):
            return f"no file holds all of {name}"
    return _slices_fault(found.storage_data, sizes)


def _tiles(tensor: TensorStorageMetadata) -> bool:
    """Whether the pieces follow each other along one dimension and fill the tensor.

    What no piece fills would be whatever was in memory.
    """
    chunks = sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets))
    full = tuple(tensor.size)
    cut = next((d for d, size in enumerate(chunks[0].sizes) if size != full[d]), 0) if chunks else 0
    end = 0
    for chunk in chunks:
        sizes, offsets = list(chunk.sizes), list(chunk.offsets)
        if len(sizes) != len(full) or len(offsets) != len(full) or offsets[cut] != end:
            return False
        end += sizes[cut]
        sizes[cut], offsets[cut] = full[cut], 0
        if tuple(sizes) != full or any(offsets):
            return False
    return end == full[cut]


def _slices_fault(slices: Mapping[object, object], sizes: Mapping[str, int]) -> str | None:
    """Slices must fill each file from its first byte to its last, without gaps and overlaps."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for info in slices.values():
        if not isinstance(info, _StorageInfo) or info.relative_path not in sizes:
            return "it refers to a file that the checkpoint does not have"
        if info.length <= 0 or info.transform_descriptors:
            return f"it refers to an impossible slice of {info.relative_path}"
        by_file.setdefault(info.relative_path, []).append((info.offset, info.length))
    for path, parts in by_file.items():
        end = 0
        for offset, length in sorted(parts):
            if offset != end:
                return f"the slices of {path} overlap or leave gaps at byte {min(offset, end)}"
            end += length
        if sizes[path] != end:
            return f"{path} has {sizes[path]} bytes, its slices end at {end}"
    return None
