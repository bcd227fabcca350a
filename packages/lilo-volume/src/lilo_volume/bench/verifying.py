"""How fast a checkpoint is verified in full, against what its digest could do at best."""

from __future__ import annotations

import time

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.digest import new_hasher
from lilo_volume.manifest import attempt_folder
from lilo_volume.transfer import BLOCK_BYTES, check_files, default_workers, each, file_blocks
from lilo_volume.volumes.local import LocalVolume


def rates(volume: LocalVolume, checkpoint: Checkpoint, data: memoryview) -> dict[str, float]:
    """Bytes per second: of `verify="full"`, of reading and digesting alone, and of digesting memory.

    The files are in the page cache, where they were just written; all three use as many threads.
    """
    entries = checkpoint.manifest.files
    folder = attempt_folder(checkpoint.publication)
    algorithm = entries[0].algorithm
    places = [volume.local_path(f"{folder}/{entry.path}") for entry in entries]

    def read(index: int) -> None:
        hasher = new_hasher(algorithm)
        assert hasher is not None, "it was published with it"
        for block in file_blocks(places[index]):
            hasher.update(block)

    def digest(index: int) -> None:
        hasher = new_hasher(algorithm)
        assert hasher is not None, "it was published with it"
        for start in range(0, entries[index].size_bytes, BLOCK_BYTES):
            place = start % (len(data) - BLOCK_BYTES)
            hasher.update(data[place : place + BLOCK_BYTES])

    def verify(_: int) -> None:
        faults = check_files(volume, folder, entries, workers=workers)
        assert not faults, faults

    workers = default_workers()
    seconds: dict[str, float] = {}
    for name, action, count in (
        ("verify", verify, 1),
        ("read_and_digest", read, len(entries)),
        ("digest", digest, len(entries)),
    ):
        started = time.perf_counter()
        each(range(count), action, workers=workers if count > 1 else 1)
        seconds[name] = time.perf_counter() - started
    return {name: checkpoint.size_bytes / spent for name, spent in seconds.items()}
