"""Tensor: the one array type that crosses Lilo's seams, as little-endian bytes with a shape.

It is a frozen value: equal bytes are equal tensors, so operations can be compared and fingerprinted.
Arithmetic happens in numpy views (here) or torch views (on the ranks), never on JSON numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

DType: TypeAlias = Literal["float32", "int64", "int32"]

_NUMPY: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A dense row-major array."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes
    """Little-endian, row-major; exactly the product of `shape` times the item size long."""

    def __post_init__(self) -> None:
        """Check that the bytes fill the shape.

        Raises:
            ValueError: the shape is negative or the bytes are too few or too many.
        """
        size = _NUMPY[self.dtype].itemsize
        for axis in self.shape:
            if axis < 0:
                raise ValueError(f"shape {list(self.shape)} has a negative axis")
            size *= axis
        if len(self.data) != size:
            raise ValueError(
                f"a {self.dtype} tensor of shape {list(self.shape)} needs {size} bytes, "
                f"got {len(self.data)}"
            )

    @classmethod
    def of(cls, values: npt.ArrayLike, dtype: DType) -> Tensor:
        """Copy `values` (any shape) into a tensor of `dtype`."""
        array = np.ascontiguousarray(values, dtype=_NUMPY[dtype])
        return cls(dtype=dtype, shape=tuple(array.shape), data=array.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """A read-only view of the bytes, shape `self.shape`; no copy."""
        return np.frombuffer(self.data, dtype=_NUMPY[self.dtype]).reshape(self.shape)
