"""Settings: what a benchmark writes, and how often."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Self

from lilo_volume.digest import FAST, new_hasher

GIB = 1024**3
MIB = 1024**2
PAIR = ("plain_fsync", "xxh3_fsync")
"""Measured next to each other in every pass: their ratio is the figure that counts."""


def default_ways() -> tuple[str, ...]:
    """All that this installation can do: without the extra `fast`, XXH3 is left out."""
    ways = (*PAIR, "plain", "xxh3", "sha256_fsync", "sha256", "copying_fsync")
    without = () if new_hasher(FAST) is not None else ("xxh3_fsync", "xxh3")
    return tuple(way for way in ways if way not in without)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. Every node writes its share of the shards, one after another, in every way of `ways`."""

    folder: str
    """Where the files go; emptied again."""
    size_bytes: int = 2 * GIB
    """Of one checkpoint, over all nodes."""
    shards: int = 16
    nodes: int = 2
    passes: int = 5
    """Counted ones; one more goes before them and is thrown away, since blocks that a disk never had are slow."""
    ways: tuple[str, ...] = field(default_factory=default_ways)

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if not 1 <= self.nodes <= self.shards or self.passes < 1:
            raise ValueError(
                f"{self.nodes} nodes, {self.shards} shards, {self.passes} passes: expected at least one pass, "
                "and a shard for every node"
            )
        if self.size_bytes < self.shards * MIB:
            raise ValueError(
                f"{self.size_bytes} bytes in {self.shards} shards: a shard has at least 1 MiB"
            )

    def to_json(self) -> str:
        """For the command line of a node."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` made."""
        given: dict[str, Any] = json.loads(text)
        given["ways"] = tuple(given["ways"])
        return cls(**given)

    @property
    def shard_bytes(self) -> int:
        """Of each shard."""
        return self.size_bytes // self.shards

    def shards_of(self, rank: int) -> range:
        """Numbers of the shards that a node writes."""
        return range(rank, self.shards, self.nodes)
