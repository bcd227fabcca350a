"""Types of torch's custom autograd functions, which torch leaves open."""

from __future__ import annotations

from typing import Any, TypeAlias

AutogradContext: TypeAlias = Any
"""The `ctx` of a custom function: takes any attribute."""
AutogradGrads: TypeAlias = Any
"""One gradient or None per input of the forward."""
