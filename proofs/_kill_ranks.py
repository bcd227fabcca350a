"""The processes of `_kill.py`: ranks that publish and a reader beside them, forked, telling what they do. Not a proof."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable

from lilo_volume import VolumeError, begin, held_latest, tcp_group

NODES = ("node0", "node0", "node1", "node1")
WORLD = len(NODES)
COLLECTION, KIND = "run", "weights"
SHARD_BYTES = 4096


class Timed:
    """A group that notes how long it was waited for."""

    def __init__(self, group, tell: Callable[[dict], None]) -> None:
        self._group = group
        self._tell = tell
        self.rank, self.world_size, self.nodes = group.rank, group.world_size, group.nodes

    def _wait(self, call, value, timeout_s, step):
        start = time.monotonic()
        try:
            return call(value, timeout_s=timeout_s, step=step)
        finally:
            self._tell({"over": time.monotonic() - start - timeout_s})

    def all_gather(self, value, *, timeout_s, step):
        return self._wait(self._group.all_gather, value, timeout_s, step)

    def broadcast(self, value, *, timeout_s, step):
        return self._wait(self._group.broadcast, value, timeout_s, step)

    def barrier(self, *, timeout_s, step):
        self.all_gather(None, timeout_s=timeout_s, step=step)


def shard(step: int, rank: int) -> bytes:
    """Bytes that tell which save and which rank they are of."""
    return f"{step}:{rank};".encode() * (SHARD_BYTES // 8)


def is_whole(checkpoint) -> bool:
    """Whether every byte is of the save that the checkpoint claims to be."""
    step = checkpoint.publication.order
    return all(
        (checkpoint.folder / f"shard{rank}").read_bytes() == shard(step, rank)
        for rank in range(WORLD)
    )


def fork(action: Callable[[Callable[[dict], None]], None]) -> tuple[int, int]:
    """Run `action` in a child; its process id and a pipe from which it tells, one JSON object a line."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    code = 1
    try:
        os.close(reading)

        def tell(told: dict) -> None:
            os.write(writing, json.dumps(told).encode() + b"\n")

        action(tell)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing of the parent's may run or be flushed here


def publish(place, listener, address, token, rank, step, name, deadline_s, tell) -> None:
    """One rank's save."""
    if rank:
        listener.close()
    volume = place.open(NODES[rank])
    try:
        with tcp_group(
            address,
            rank=rank,
            world_size=WORLD,
            token=token,
            node=NODES[rank],
            timeout_s=deadline_s,
            listener=None if rank else listener,
        ) as group:
            attempt = begin(
                volume,
                Timed(group, tell),
                collection=COLLECTION,
                kind=KIND,
                name=name,
                order=step,
                overwrite=True,
                timeout_s=deadline_s,
                node=NODES[rank],
                durable=False,
                on_step=lambda name: tell({"step": name}),
            )
            with attempt.create(f"shard{rank}") as file:
                file.write(shard(step, rank))
            attempt.publish(expected=[f"shard{rank}" for rank in range(WORLD)])
    except VolumeError as error:
        tell({"ended": type(error).__name__, "text": str(error)})
    else:
        tell({"ended": "published"})


def read_on(place, tell) -> None:
    """A reader beside the publishers: loads the latest again and again, for as long as the parent lives."""
    volume = place.open("reader")
    seen = 0
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            with held_latest(
                volume, COLLECTION, KIND, verify="full", lease_s=60.0, node="reader"
            ) as found:
                if found.checkpoint is None:
                    continue
                step = found.checkpoint.publication.order
                if not is_whole(found.checkpoint):
                    tell({"violation": f"the reader got a mix in step {step}"})
                if step < seen:
                    tell({"violation": f"the reader got step {step} after step {seen}"})
                seen = max(seen, step)
                tell({"read": step})
        except (VolumeError, OSError) as error:
            tell({"violation": f"the reader: {type(error).__name__}: {error}"})
        time.sleep(0.01)  # it would take a whole core from the publishers
