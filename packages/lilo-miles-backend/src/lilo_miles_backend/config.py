"""BackendSettings: what a machine decides about a trainer, as opposed to its definition. Reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lilo_engine.errors import InvalidRequest

_THREADS = "LILO_RANK_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of this machine, read once when the backend starts."""

    threads_per_rank: int = 1
    """torch threads of one rank. One, since ranks x threads over the cores makes timings collapse, and a
    laptop's cores also serve HTTP and the sampler. `LILO_RANK_THREADS`."""

    @classmethod
    def from_environment(cls) -> BackendSettings:
        """Read the variables named above.

        Raises:
            InvalidRequest: a variable is not a whole number from 1.
        """
        text = os.environ.get(_THREADS, "1")
        if not text.isdecimal() or int(text) < 1:
            raise InvalidRequest(f"{_THREADS} is {text!r}; expected a whole number from 1")
        return cls(threads_per_rank=int(text))
