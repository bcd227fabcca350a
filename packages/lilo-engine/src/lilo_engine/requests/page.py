"""page_of: which part of a list is asked for, within what a server gives at once and a database can count."""

from __future__ import annotations

_MAX_LIMIT = 1000
_MAX_OFFSET = 2**62


def page_of(limit: int, offset: int) -> tuple[int, int]:
    """Limit and offset, each brought into its range."""
    return min(max(limit, 0), _MAX_LIMIT), min(max(offset, 0), _MAX_OFFSET)
