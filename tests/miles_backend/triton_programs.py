"""Programs: what each program of a Triton kernel reads and writes, seen through Triton's interpreter.

On a GPU programs run at once and in any order, so none may write what another one writes or reads in the same launch. The
interpreter runs one after another and gives the right numbers all the same; here such a launch is seen by its addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest


@dataclass
class _Touched:
    """Addresses, and the program that used each, of one launch."""

    addresses: list[np.ndarray] = field(default_factory=list)
    programs: list[np.ndarray] = field(default_factory=list)

    def note(self, pointers: np.ndarray, mask: np.ndarray, program: int) -> None:
        used = np.unique(np.broadcast_to(pointers, mask.shape)[mask.astype(bool)])
        self.addresses.append(used)
        self.programs.append(np.full(used.shape, program))

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """All of them, addresses ascending."""
        if not self.addresses:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        addresses, programs = np.concatenate(self.addresses), np.concatenate(self.programs)
        order = np.argsort(addresses, kind="stable")
        return addresses[order], programs[order]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels in whose launches programs touched what another one wrote, in words."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports] - of CUDA builds

    builder, run = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store
    read, written = _Touched(), _Touched()
    found: list[str] = []

    def program() -> int:
        (x, y, z), (_, height, depth) = builder.grid_idx, builder.grid_dim
        return (x * height + y) * depth + z

    def loading(pointers: Any, mask: Any, *rest: Any) -> Any:
        read.note(pointers.data, mask.data, program())
        return load(pointers, mask, *rest)

    def storing(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written.note(pointers.data, mask.data, program())
        return store(pointers, value, mask, *rest)

    def launching(self: Any, *args: Any, **kwargs: Any) -> None:
        for touched in (read, written):
            touched.addresses.clear()
            touched.programs.clear()
        run(self, *args, **kwargs)
        if conflict := _conflict(read, written):
            found.append(f"{self.fn.__name__}: {conflict}")

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", loading)
        patch.setattr(builder, "create_masked_store", storing)
        patch.setattr(interpreter.GridExecutor, "__call__", launching)
        yield found


def _conflict(read: _Touched, written: _Touched) -> str:
    addresses, writers = written.pairs()
    twice = (addresses[1:] == addresses[:-1]) & (writers[1:] != writers[:-1])
    if twice.any():
        return f"{int(twice.sum())} elements are written by several programs"
    loaded, readers = read.pairs()
    place = np.searchsorted(addresses, loaded)
    place[place == len(addresses)] = 0
    if not len(addresses):
        return ""
    foreign = (addresses[place] == loaded) & (writers[place] != readers)
    return f"{int(foreign.sum())} elements are read by other programs" if foreign.any() else ""
