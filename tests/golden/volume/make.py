"""Writes the checkpoints that are kept here: `python make.py FOLDER`, with the lilo-volume whose format is to be kept.

Run once for every released format, into `format-N`; what is kept is never written again. Times, attempts and the node
are fixed.
"""

import itertools
import os
import sys
import threading
from pathlib import Path
from unittest import mock

os.environ["MODAL_TASK_ID"] = "golden-node"

from lilo_volume import LocalVolume, SoloGroup, begin
from lilo_volume.testing import run_ranks

NOON_NS = 1_790_000_000_000_000_000


def main() -> None:
    root = Path(sys.argv[1])
    if root.exists():
        sys.exit(f"{root} is there; what is kept is never written again")
    volume = LocalVolume(root)
    numbers, lock = itertools.count(1), threading.Lock()

    def fixed_bytes(count: int) -> bytes:
        with lock:
            return next(numbers).to_bytes(count, "big")

    with mock.patch("os.urandom", fixed_bytes), mock.patch("time.time_ns", return_value=NOON_NS):
        attempt = begin(
            volume,
            SoloGroup(),
            collection="run:Train/0",
            kind="weights",
            name="Step 18 \u00e9",
            order=18,
            algorithm="sha256",
        )
        for path, data in (("model/part.bin", bytes(range(256))), ("empty", b"")):
            with attempt.create(path) as file:
                file.write(data)
        attempt.publish(
            expected=["model/part.bin", "empty"],
            layout={"tp": 1},
            metadata={"base_model": "tiny", "note": 'quotes " and \u2014'},
        )

        def save(group):
            attempt = begin(
                volume,
                group,
                collection="run:Train/0",
                kind="weights",
                name="x" * 300,
                order=19,
                algorithm="sha256",
            )
            if group.rank != 1:
                with attempt.create(f"__{group.rank}_0.distcp") as file:
                    file.write(b"%d" % group.rank * 10)
            attempt.publish(layout={"dp": 3})

        run_ranks(3, save)
    (stray,) = list(root.rglob("empty"))
    (stray.parent / "stray").write_bytes(b"not part of the checkpoint")
    for lock_file in (root / ".lilo-locks").iterdir():
        lock_file.unlink()
    (root / ".lilo-locks").rmdir()


if __name__ == "__main__":
    main()
