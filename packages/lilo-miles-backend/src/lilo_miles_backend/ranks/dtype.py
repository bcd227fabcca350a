"""The dtype that a definition's model computes in, as torch names it."""

from __future__ import annotations

import torch
from lilo_definitions import Definition

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(definition: Definition) -> torch.dtype:
    """Of base weights, activations and the copies of adapters that products are computed with."""
    return _DTYPES[definition.dtype]
