"""Planners: what torch's checkpoint planning is told about tensors of which a rank holds a part.

torch knows parts as DTensors, which need a device mesh and process groups; an adapter knows its parts by itself
(`shards.py`). So the plans are made here, and everything after (who writes a replica, which part of which file a
reader needs) is torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lilo_engine.errors import CommandFailed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lilo_miles_backend.shards import Block, FactorShard


class ShardSavePlanner(DefaultSavePlanner):
    """Plans to write the part of each tensor that this rank holds; an empty part is not written."""

    def __init__(self, shards: Mapping[str, FactorShard]) -> None:
        """`shards` has each tensor's part, by its name in the state dict; those not named are whole."""
        # The names are flat already; letting the planner look for nested ones costs a fifth of a small save.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        """One item for each block of each tensor that this rank holds."""
        items = [
            _write_item(name, tensor, self._shards.get(name), block)
            for name, tensor in self.state_dict.items()
            if tensor.numel()
            for block in _blocks(tensor, self._shards.get(name))
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The block that an item writes."""
        return _block_at(self.state_dict[index.fqn], self._shards.get(index.fqn), index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans to read into each tensor the part of the whole that it stands for."""

    def __init__(self, shards: Mapping[str, FactorShard]) -> None:
        """`shards` has each tensor's part, by its name in the state dict; those not named are whole."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> LoadPlan:
        """As many items for each tensor as pieces of the checkpoint hold some of it."""
        assert self.metadata is not None, "set_up_planner was called with metadata"
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            found = self.metadata.state_dict_metadata[name]
            assert isinstance(found, TensorStorageMetadata), "`.metadata` was checked"
            if tensor.numel():
                blocks = _blocks(tensor, self._shards.get(name))
                items += create_read_items_for_chunk_list(name, found, [_chunk(b) for b in blocks])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The block that an item is read into, wholly or in part."""
        return _block_at(self.state_dict[index.fqn], self._shards.get(index.fqn), index)

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        """Refuse: torch would unpickle the bytes without an allow-list."""
        raise CommandFailed(f"{read_item.dest_index.fqn} is no tensor")


def _blocks(tensor: torch.Tensor, shard: FactorShard | None) -> tuple[Block, ...]:
    """What a tensor holds of the whole, as rectangles: DCP knows no others."""
    return (shard or FactorShard(full=(tensor.shape[0], tensor.shape[1]))).blocks


def _block_at(
    tensor: torch.Tensor, shard: FactorShard | None, index: MetadataIndex
) -> torch.Tensor:
    """The view of `tensor` that is the block at an index's offsets."""
    assert index.offset is not None, "every item was planned with its offsets"
    (block,) = (b for b in _blocks(tensor, shard) if b.offsets == tuple(index.offset))
    return tensor[block.place]


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.shape))


def _write_item(
    name: str, tensor: torch.Tensor, shard: FactorShard | None, block: Block
) -> WriteItem:
    chunk = _chunk(block)
    size = tensor.size() if shard is None else torch.Size(shard.full)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.TENSOR if chunk.sizes == size else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(tensor),
            size=size,
        ),
    )
