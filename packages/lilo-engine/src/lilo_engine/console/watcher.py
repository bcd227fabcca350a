"""Watcher: hears of operations and commands as they happen, for traces that leave the process. Costs nothing unwatched."""

from __future__ import annotations

from typing import Protocol

from lilo_engine.console.span import Span
from lilo_engine.operations.ledger import Entry


class Watcher(Protocol):
    """Called from the engine's event loop; must return at once."""

    def accepted(self, entry: Entry) -> None:
        """An operation was accepted and waits for its turn."""
        ...

    def finished(self, entry: Entry) -> None:
        """It has its result or its error; may be told again."""
        ...

    def began(self, span: Span) -> None:
        """A command starts."""
        ...

    def ended(self, span: Span) -> None:
        """It ended."""
        ...

    def close(self) -> None:
        """Send what was not sent yet; may block for some seconds."""
        ...


class Unwatched:
    """Implements `Watcher`: nobody watches."""

    def accepted(self, entry: Entry) -> None:
        """See `Watcher`."""

    def finished(self, entry: Entry) -> None:
        """See `Watcher`."""

    def began(self, span: Span) -> None:
        """See `Watcher`."""

    def ended(self, span: Span) -> None:
        """See `Watcher`."""

    def close(self) -> None:
        """See `Watcher`."""
