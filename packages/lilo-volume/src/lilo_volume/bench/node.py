"""One node of a benchmark: a process that writes its shards in every way, in step with the others.

    python -m lilo_volume.bench.node SETTINGS(JSON) RANK HOST:PORT TOKEN

Rank 0 prints one JSON object: for every way the seconds and CPU seconds of each pass, and what verifying took.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lilo_volume.attempt import begin
from lilo_volume.bench.settings import MIB, Settings
from lilo_volume.bench.verifying import rates
from lilo_volume.catalogue import remove
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.digest import FAST, STANDARD
from lilo_volume.files import flush_folder
from lilo_volume.group import Group
from lilo_volume.groups.tcp import tcp_group
from lilo_volume.manifest import attempt_folder
from lilo_volume.volumes.local import LocalVolume

LIMIT_S = 600.0
"""For the other nodes at each step."""
WRITE_BYTES = 4 * MIB
"""A writer hands over this much at once, as one of large tensors does."""
_PLAIN_BYTES = MIB
"""What plain writing does at once: of 0.25, 1, 4 and 8 MiB the fastest."""
_ALGORITHMS = {"xxh3": FAST, "sha256": STANDARD}
"""Of copying: whatever is the best that there is."""


@dataclass(frozen=True, slots=True)
class Node:
    """One process, its data and its way to the others."""

    settings: Settings
    group: Group
    volume: LocalVolume
    data: memoryview
    """Random; written again and again from changing places."""

    def blocks(self, shard: int) -> Iterator[memoryview]:
        """The bytes of one shard; no two shards are equal."""
        left, start = self.settings.shard_bytes, shard * 4096
        while left:
            size = min(left, WRITE_BYTES)
            start %= len(self.data) - size
            yield self.data[start : start + size]
            start, left = start + WRITE_BYTES + 4096, left - size

    def write_plain(self, folder: Path, *, durable: bool) -> None:
        """Write this node's shards to plain files: no digest, no agreement, nothing to publish."""
        folder.mkdir(exist_ok=True)
        for shard in self.settings.shards_of(self.group.rank):
            with (folder / f"shard-{shard}").open("xb", buffering=0) as file:
                for block in self.blocks(shard):
                    for start in range(0, len(block), _PLAIN_BYTES):
                        piece = block[start : start + _PLAIN_BYTES]
                        while piece:
                            piece = piece[file.write(piece) or 0 :]
                if durable:
                    os.fsync(file.fileno())
        if durable:
            flush_folder(folder)

    def publish(self, way: str, number: int, *, durable: bool) -> Checkpoint:
        """Write this node's shards as a checkpoint and publish it with the others."""
        with begin(
            self.volume,
            self.group,
            collection="bench",
            kind=way,
            name=str(number),
            order=number,
            algorithm=_ALGORITHMS.get(way),
            durable=durable,
            node=f"node-{self.group.rank}",
            timeout_s=LIMIT_S,
        ) as attempt:
            expected = [f"shard-{shard}" for shard in range(self.settings.shards)]
            own = [expected[shard] for shard in self.settings.shards_of(self.group.rank)]
            if way == "copying":
                source = f"{attempt_folder(attempt.publication)}/framework"
                self.write_plain(self.volume.local_path(source), durable=durable)
                return attempt.publish_from(source, files=own, shards="shard-*", expected=expected)
            for shard in self.settings.shards_of(self.group.rank):
                with attempt.create(expected[shard]) as file:
                    for block in self.blocks(shard):
                        file.write(block)
            return attempt.publish(expected=expected)

    def run(self, way: str, number: int) -> Checkpoint | None:
        """One way, once."""
        kind, _, policy = way.partition("_")
        durable = policy == "fsync"
        if kind == "plain":
            self.write_plain(self.volume.root / f"plain-{number}", durable=durable)
            return None
        return self.publish(kind, number, durable=durable)

    def clear(self, way: str, number: int, checkpoint: Checkpoint | None) -> None:
        """Rank 0 removes what was written, so that all ways find the disk alike; not measured."""
        if self.group.rank == 0 and checkpoint is None:
            shutil.rmtree(self.volume.root / f"plain-{number}")
        elif self.group.rank == 0 and checkpoint is not None:
            remove(self.volume, checkpoint)
        self.meet(f"clear {way}")

    def meet(self, step: str) -> None:
        """Wait for the other nodes."""
        self.group.barrier(timeout_s=LIMIT_S, step=step)


@dataclass(slots=True)
class Log:
    """What was measured, in the order of the passes."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    """Of all nodes together."""
    verify: dict[str, list[dict[str, float]]]


def measure(node: Node) -> Log:
    """All passes, the first of which is not kept. Every other pass goes through the ways backwards."""
    ways = node.settings.ways
    log = Log({way: [] for way in ways}, {way: [] for way in ways}, {})
    for number in range(node.settings.passes + 1):
        for way in ways if number % 2 == 0 else reversed(ways):
            node.meet(f"start {way}")
            started, cpu = time.perf_counter(), time.process_time()
            checkpoint = node.run(way, number)
            node.meet(f"end {way}")
            wall = time.perf_counter() - started
            spent = node.group.all_gather(time.process_time() - cpu, timeout_s=LIMIT_S, step="cpu")
            if number:
                log.wall_s[way].append(wall)
                log.cpu_s[way].append(sum(spent))
            if number and checkpoint is not None and way in ("xxh3", "sha256"):
                if node.group.rank == 0:
                    samples = [rates(node.volume, checkpoint, node.data) for _ in range(2)]
                    log.verify.setdefault(way, []).extend(samples)
                node.meet("verify")
            node.clear(way, number, checkpoint)
            if node.group.rank == 0:
                sys.stderr.write(f"pass {number}  {way:<14} {wall:8.3f} s\n")
    return log


def main() -> None:
    """Be one node, as the arguments say."""
    raw, rank, address, token = sys.argv[1:]
    settings = Settings.from_json(raw)
    with tcp_group(
        address,
        rank=int(rank),
        world_size=settings.nodes,
        token=token,
        node=f"node-{rank}",
        timeout_s=LIMIT_S,
    ) as group:
        data = memoryview(os.urandom(64 * MIB))
        node = Node(settings, group, LocalVolume(Path(settings.folder)), data)
        node.meet("ready")
        before = _peak_bytes()
        log = measure(node)
        grown = group.all_gather(_peak_bytes() - before, timeout_s=LIMIT_S, step="memory")
    if group.rank == 0:
        sys.stdout.write(
            json.dumps(
                {
                    "wall_s": log.wall_s,
                    "cpu_s": log.cpu_s,
                    "verify": log.verify,
                    "memory_growth_bytes": max(grown),
                }
            )
        )


def _peak_bytes() -> int:
    """The most memory this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
