"""Sizes as a person types them: `500000`, `64MiB`, `1.5 GB`."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes.

    Raises:
        typer.BadParameter: it is no size above 0.
    """
    found = _SIZE.fullmatch(text.strip())
    size = 0
    if found is not None:
        number, power, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or for example 64MiB or 1GB")
    return size


def show_size(size_bytes: int) -> str:
    """As short as it can be said exactly, else with one decimal."""
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        whole = 1024**power
        if size_bytes >= whole:
            return f"{size_bytes / whole:.1f}{unit}".replace(".0", "")
    return f"{size_bytes}B"
