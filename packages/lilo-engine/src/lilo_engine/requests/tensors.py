"""Wire tensors to `Tensor`: two encodings (dense, sparse CSR), four dtypes, one canonical form.

Integers become int64 and floats float32, whatever the wire used, so that every encoding of one datum gives
the same operation. Used by `wire_protobuf.py` and, for JSON numbers, by `decode.py`.

Legend: R rows, C columns, N listed cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.tensor import Tensor

WireDType = Literal["float32", "int64", "int32", "bfloat16"]
MAX_DENSE_BYTES = 64 * 1024 * 1024
"""A sparse tensor of a few bytes may state any shape; this bounds what it is densified to."""

_STORED: dict[WireDType, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "bfloat16": np.dtype("<u2"),
}


def from_dense(data: bytes, dtype: WireDType, shape: Sequence[int], what: str) -> Tensor:
    """A dense tensor; an empty `shape` means one axis.

    Raises:
        InvalidRequest: the bytes do not fill the shape; `what` names the tensor.
    """
    sent = _view(data, dtype, what)
    values = _widen(sent, dtype)
    return _shaped(values, data if values is sent else values.tobytes(), tuple(shape), what)


def from_csr(
    values: bytes,
    crow_indices: npt.NDArray[np.int64],
    col_indices: npt.NDArray[np.int64],
    *,
    dtype: WireDType,
    shape: Sequence[int],
    what: str,
) -> Tensor:
    """A sparse CSR tensor made dense; unlisted cells are 0.

    Args:
        values: N items of `dtype`.
        crow_indices: shape [R + 1], where row r's cells are crow[r] .. crow[r + 1].
        col_indices: shape [N].
        dtype: Of `values`.
        shape: [R, C].
        what: Names the tensor in messages.

    Raises:
        InvalidRequest: the indices do not describe cells of the shape, or it is too large.
    """
    cells = _widen(_view(values, dtype, what), dtype)
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidRequest(
            f"{what}: a sparse tensor needs a shape [rows, columns], got {list(shape)}"
        )
    num_rows, num_columns = shape
    if num_rows * num_columns * cells.itemsize > MAX_DENSE_BYTES:
        raise InvalidRequest(
            f"{what}: shape {list(shape)} is over {MAX_DENSE_BYTES} bytes when dense"
        )
    if not csr_fits(crow_indices, col_indices, cells.size, num_rows, num_columns):
        raise InvalidRequest(
            f"{what}: the indices of the sparse tensor do not describe {cells.size} cells of "
            f"shape {list(shape)}"
        )
    dense = np.zeros((num_rows, num_columns), dtype=cells.dtype)
    dense[np.repeat(np.arange(num_rows), np.diff(crow_indices)), col_indices] = cells
    return Tensor.of(dense, "float32" if cells.dtype.kind == "f" else "int64")


def indices(data: bytes, what: str) -> npt.NDArray[np.int64]:
    """Index bytes (int64) as an array."""
    return _view(data, "int64", what)


def token_ids(pieces: Sequence[bytes], what: str) -> Tensor:
    """Text chunks, each int32 little-endian, joined to one int32 tensor of shape [n]."""
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) % 4:
        raise InvalidRequest(
            f"{what}: token ids are int32, {len(data)} bytes are no whole number of them"
        )
    return Tensor(dtype="int32", shape=(len(data) // 4,), data=data)


def _view(data: bytes, dtype: WireDType, what: str) -> npt.NDArray[Any]:
    stored = _STORED[dtype]
    if len(data) % stored.itemsize:
        raise InvalidRequest(
            f"{what}: {len(data)} bytes are no whole number of {dtype} items of {stored.itemsize} bytes"
        )
    return np.frombuffer(data, dtype=stored)


def _widen(values: npt.NDArray[Any], dtype: WireDType) -> npt.NDArray[Any]:
    match dtype:
        case "bfloat16":  # the upper half of a float32
            return (values.astype("<u4") << 16).view("<f4")
        case "int32":
            return values.astype("<i8")
        case "float32" | "int64":
            return values


def _shaped(values: npt.NDArray[Any], data: bytes, shape: tuple[int, ...], what: str) -> Tensor:
    shape = shape or values.shape
    size = 1
    for axis in shape:
        size *= axis
    if min(shape, default=0) < 0 or size != values.size:
        raise InvalidRequest(
            f"{what}: shape {list(shape)} does not hold the {values.size} values that were sent"
        )
    dtype = "float32" if values.dtype.kind == "f" else "int64"
    return Tensor(dtype=dtype, shape=shape, data=data)


def csr_fits(
    crow: npt.NDArray[np.int64],
    col: npt.NDArray[np.int64],
    num_cells: int,
    num_rows: int,
    num_columns: int,
) -> bool:
    """Whether CSR indices describe `num_cells` cells of a table of `num_rows` x `num_columns`."""
    if crow.size != num_rows + 1 or col.size != num_cells or crow[0] != 0 or crow[-1] != num_cells:
        return False
    return bool((np.diff(crow) >= 0).all() and (col >= 0).all() and (col < num_columns).all())
