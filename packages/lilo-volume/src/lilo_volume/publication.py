"""Publication: the unit of lilo-volume: one named state of one collection, written in one attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Where and under which name a checkpoint is published.

    Folder: encoded collection / kind / encoded name / attempt.
    """

    collection: str
    """Whose states these are: one model's. Any text; it is encoded into one path component."""
    kind: str
    """Which sort of state, as `weights`; checkpoints of different kinds never share a folder or an order."""
    name: str
    """The user's name, or a step. Any text; encoded."""
    order: int
    """Decides which checkpoint of a collection and kind is the latest; larger is later."""
    attempt: str
    """Drawn per try, so that two tries can never mix."""
