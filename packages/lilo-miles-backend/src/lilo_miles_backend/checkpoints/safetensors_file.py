"""SafetensorsFile: tensors written as one `.safetensors`, byte for byte what `safetensors.torch.save` returns.

Not by that function: it puts a second copy of everything together in memory, and holds the interpreter all the while,
which the thread that trains waits for. Here each tensor's own memory goes into the file.

Format: eight bytes with the header's length, a JSON header padded to eight bytes, the tensors' bytes in its order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

_ALIGNMENT = 8
_FLOAT32 = "F32"


class Out(Protocol):
    """Where the bytes go."""

    def write(self, data: bytes | memoryview) -> int:
        """Append."""
        ...


def write_safetensors(
    file: Out, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write float32 tensors on the CPU, each contiguous, in the order of their names."""
    for tensor in tensors.values():
        assert tensor.dtype == torch.float32, f"only float32 is written here, not {tensor.dtype}"
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    header |= dict(_entries(tensors))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        file.write(tensors[name].numpy().data.cast("B"))


def _entries(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, object]]:
    start = 0
    for name in sorted(tensors):
        stop = start + tensors[name].nbytes
        yield (
            name,
            {
                "dtype": _FLOAT32,
                "shape": list(tensors[name].shape),
                "data_offsets": [start, stop],
            },
        )
        start = stop
