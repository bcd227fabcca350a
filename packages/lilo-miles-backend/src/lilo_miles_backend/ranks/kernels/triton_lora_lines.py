# pyright: reportMissingImports=false
"""Lines: what a program of the adapters' kernels reads of its adapter's line of the table. Not to be called elsewhere.

`segment_tables.py` writes them. Numbers from memory are given their divisors, without which the compiler would read two
bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def field_of(table, line, index: tl.constexpr, FIELDS: tl.constexpr):
    """One number of it, int64."""
    return tl.load(table + line * FIELDS + index)


@triton.jit
def pointer_of(
    table,
    line,
    index: tl.constexpr,
    dtype: tl.constexpr,
    ALIGN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """The address in a field, of elements of `dtype`."""
    pointer = field_of(table, line, index, FIELDS).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, ALIGN)


@triton.jit
def rank_of(table, line, DIVISOR: tl.constexpr, FIELDS: tl.constexpr):
    """Its lora_rank."""
    return tl.multiple_of(field_of(table, line, 4, FIELDS).to(tl.int32), DIVISOR)


@triton.jit
def scale_of(table, line, FIELDS: tl.constexpr):
    """Its scale, float32."""
    return field_of(table, line, 5, FIELDS).to(tl.int32).to(tl.float32, bitcast=True)
