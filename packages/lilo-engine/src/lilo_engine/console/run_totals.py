"""Run totals: where the time of one run went, and how long its data was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from lilo_engine.operations.operation import ModelId


class Timed(Protocol):
    """A command that ended (`recorder.Span`)."""

    @property
    def command(self) -> str:
        """Its name."""
        ...

    @property
    def model_ids(self) -> tuple[ModelId, ...]:
        """Of its operations."""
        ...

    @property
    def started_s(self) -> float:
        """When it began."""
        ...

    @property
    def ended_s(self) -> float | None:
        """When it ended."""
        ...

    @property
    def tokens(self) -> int:
        """Of all its operations."""
        ...


@dataclass(slots=True)
class Lengths:
    """Lengths of datums, in tokens."""

    count: int = 0
    total: int = 0
    longest: int = 0
    truncated: int = 0
    """Datums that fill the context: they were cut there, most likely."""
    powers: dict[int, int] = field(default_factory=dict[int, int])
    """Bits of the length -> datums; 8 stands for 128 to 255."""

    def add(self, lengths: Iterable[int], context: int) -> None:
        """Count these."""
        powers = self.powers
        for length in lengths:
            self.count += 1
            self.total += length
            if length > self.longest:
                self.longest = length
            if context and length >= context:
                self.truncated += 1
            bits = length.bit_length()
            powers[bits] = powers.get(bits, 0) + 1


@dataclass(slots=True)
class RunTotals:
    """One model's share of the lanes."""

    first_s: float | None = None
    """When its first command began."""
    last_s: float = 0.0
    """When its newest one ended."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Command -> seconds; of a shared command the share of its tokens."""
    commands: dict[str, int] = field(default_factory=dict[str, int])
    tokens: int = 0
    lengths: Lengths = field(default_factory=Lengths)
    _expected: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens of its own in a shared command that runs."""

    def expect(self, span: Timed, tokens: int) -> None:
        """A shared command began that has so many tokens of this run."""
        self._expected[id(span)] = self._expected.get(id(span), 0) + tokens

    def add(self, span: Timed) -> None:
        """A command ended that has operations of this run."""
        assert span.ended_s is not None
        own = self._expected.pop(id(span), 0)
        share = own / span.tokens if span.tokens else 1.0
        took_s = (span.ended_s - span.started_s) * share
        self.seconds[span.command] = self.seconds.get(span.command, 0.0) + took_s
        operations = len(span.model_ids) if len(set(span.model_ids)) == 1 else 1
        self.commands[span.command] = self.commands.get(span.command, 0) + operations
        self.tokens += own
        if self.first_s is None:
            self.first_s = span.started_s
        self.last_s = max(self.last_s, span.ended_s)
