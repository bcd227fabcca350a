"""Alignment: how long a row must be for a parallel layout, and what of it is padding. Pure arithmetic.

Context-parallel ranks cut a row into 2 x cp equal chunks (zigzag). Trainers whose tensor-parallel ranks need equal
shares of the tokens cut a rank's share once more; this one does not (`layers/stream_shards.py`). Padding comes after every real token, so causality hides it from them, and no
output of a padded position is ever returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lilo_definitions import Topology
from lilo_engine.errors import InvalidRequest


def required_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """What the length of a row must divide by: the least that the layout needs.

    Without context parallelism rows are whole, and only sequence parallelism cuts them (over tp). With it, a row is cut
    into 2 x cp chunks, of which each rank has two; their sum must divide by tp if it is cut again.
    """
    pieces = tp if sequence_parallel else 1
    return pieces if cp == 1 else cp * math.lcm(2, pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRow:
    """The sizes of one padded row, counted as sequence trainers count: positions and the last target."""

    tokens: int
    """Positions of the padded row."""
    num_padding: int
    """Of them, how many hold no token of the client's."""
    targets: int
    """Positions that have a next token in the padded row."""
    zero_weights: int
    """Of them, how many are padding and weigh nothing."""
    logprobs: int
    """How many go back to the client: one per position of the datum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """One layout's rule for rows."""

    mode: Literal["auto", "on", "off"]
    multiple: int

    @classmethod
    def of(cls, topology: Topology, *, sequence_parallel: bool) -> Alignment:
        """The rule that a definition asks for; `on` is 2 x cp x tp, whatever the layout needs."""
        mode = topology.align_sequences_to_parallel_layout
        if mode == "on":
            return cls(mode=mode, multiple=2 * topology.cp * topology.tp)
        return cls(
            mode=mode, multiple=required_multiple(topology.tp, topology.cp, sequence_parallel)
        )

    def row(self, num_positions: int) -> AlignedRow:
        """The sizes of a row of so many positions once it is padded.

        `on` counts the last target as a token of the row, as trainers that keep inputs and targets in one sequence do:
        10 positions are a row of 11.

        Raises:
            InvalidRequest: the mode is `off` and the row would need padding; names the multiple.
        """
        if self.mode == "off" and num_positions % self.multiple:
            raise InvalidRequest(
                f"a row of {num_positions} tokens is no multiple of {self.multiple}, which this layout needs; "
                "pad it in the client, or set align_sequences_to_parallel_layout to auto"
            )
        counted = num_positions + (self.mode == "on")
        tokens = -(-counted // self.multiple) * self.multiple
        targets = tokens - 1 if self.mode == "on" else tokens
        return AlignedRow(
            tokens=tokens,
            num_padding=tokens - num_positions,
            targets=targets,
            zero_weights=targets - num_positions,
            logprobs=num_positions,
        )

    def padded(self, num_positions: int) -> int:
        """Positions of the padded row.

        Raises:
            InvalidRequest: see `row`.
        """
        return self.row(num_positions).tokens
