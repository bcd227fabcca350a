"""Lines: what a case prints: one JSON object a line, of what was measured, or of a bound and whether it holds."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def emit(case: str, **fields: Any) -> None:
    """One measurement; numbers keep four digits."""
    print(json.dumps({"case": case, **{k: _short(v) for k, v in fields.items()}}), flush=True)


def bound(case: str, figure: str, measured: Any, required: str, good: bool) -> None:
    """One figure that must hold."""
    emit(case, figure=figure, measured=measured, required=required, **{"pass": bool(good)})


def at_most(case: str, figure: str, measured: float, limit: float) -> None:
    """The figure must not be above a limit; NaN never holds."""
    bound(case, figure, measured, f"<= {limit:g}", measured <= limit)


def at_least(case: str, figure: str, measured: float, limit: float) -> None:
    """The figure must not be below a limit; NaN never holds."""
    bound(case, figure, measured, f">= {limit:g}", measured >= limit)


def point(case: str, found: dict[str, Any]) -> None:
    """One point of a curve; an error is a failed figure, memory that ran out a fact."""
    if "error" in found:
        bound(
            case, f"{found['setting']}, {found['tokens']} tokens", found["error"], "no error", False
        )
    else:
        emit(case, **found)


@contextmanager
def part(case: str, what: str) -> Iterator[None]:
    """What raises inside is one failed figure, and the case goes on; memory that ran out is said as such."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        emit(case, setting=what, out_of_memory=True)
    except Exception as error:  # the other parts still tell something
        traceback.print_exc()
        bound(case, what, f"{type(error).__name__}: {str(error)[:300]}", "no error", False)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
