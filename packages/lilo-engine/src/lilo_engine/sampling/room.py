"""WaitingRoom: how many samples may wait or run at once, of everybody and of each owner. Pure.

An owner may take as much of the room as it leaves free, so that one client with thousands of prompts never keeps the
next one out; alone it has half of the room, two have a third each. `manager.py` asks before it accepts a sample.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lilo_engine.errors import Saturated
from lilo_engine.sampling.engine import SampleRequest

MAX_WAITING = 8192
"""Samples that wait or run; the SDK has up to 2,000 in flight for a client."""
_TOKEN_BYTES = 4
_SAMPLED_BYTES = 8
"""A token and its logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Whose sample it is, and what its key says."""

    owner: str = ""
    max_bytes: int | None = None
    """What the owner's unfinished samples may hold together, see `size_of`; None = no limit."""


class WaitingRoom:
    """Of one sampling manager."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        """Empty."""
        self._max_waiting = max_waiting
        self._waiting: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def check(self, claim: Claim, size_bytes: int) -> None:
        """See that one more of an owner has room.

        Raises:
            Saturated: it has not; nothing was begun, and the same request may be sent again.
        """
        taken, own = self._waiting.total(), self._waiting[claim.owner]
        if own >= max(1, self._max_waiting - taken) or taken >= self._max_waiting:
            raise Saturated(
                f"{own} samples of this key wait or run, of {taken} in all and {self._max_waiting} that may; "
                "send it again when some have ended"
            )
        held = self._bytes[claim.owner]
        # One that is larger alone is taken when nothing else of its owner waits.
        if claim.max_bytes is not None and held and held + size_bytes > claim.max_bytes:
            raise Saturated(
                f"the unfinished samples of this key hold up to {held} bytes, {size_bytes} more would exceed its limit "
                f"of {claim.max_bytes}; await results before sending more"
            )

    def enter(self, claim: Claim, size_bytes: int) -> None:
        """One that was checked waits."""
        self._waiting[claim.owner] += 1
        self._bytes[claim.owner] += size_bytes

    def leave(self, claim: Claim, size_bytes: int) -> None:
        """It has ended."""
        for counts, amount in ((self._waiting, 1), (self._bytes, size_bytes)):
            counts[claim.owner] -= amount
            if not counts[claim.owner]:
                del counts[claim.owner]


def size_of(request: SampleRequest) -> int:
    """Bytes of a prompt and of the longest answer that it asks for."""
    prompt_tokens = len(request.prompt) // _TOKEN_BYTES
    cells = request.num_samples * request.params.max_tokens * (1 + request.topk_sample_logprobs)
    cells += prompt_tokens * (request.topk_prompt_logprobs + request.prompt_alt_tokens_k)
    return len(request.prompt) + _SAMPLED_BYTES * cells
