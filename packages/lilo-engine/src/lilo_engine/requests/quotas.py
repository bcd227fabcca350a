"""Quotas: what each key has asked for just now, against its own limits. Pure, but for the time that it is given.

`ApiKeyLayer` asks before a body is read. Rates are token buckets that hold one second's worth, so that a client that was
quiet may begin that many requests at once. What is refused is asked again by the SDK after the time in the answer, with
the same number, so that nothing is lost.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from lilo_engine.control.access import Caller
from lilo_engine.errors import RateLimited, Saturated

FREE = frozenset(
    {
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/cancel_future",
        "/api/v1/session_heartbeat",
        "/api/v1/telemetry",
    }
)
"""Paths that begin nothing: refusing them would end sessions, or keep answers in memory for longer."""
_KEPT_BUCKETS = 4096
"""Keys with a rate that were heard of last; one that was not is full again anyway."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


class Quotas:
    """Of all keys, in this process."""

    def __init__(self) -> None:
        """Nobody has asked for anything."""
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._reading: Counter[str] = Counter()
        """Bytes of bodies that are being read, by owner."""

    def check_rate(self, caller: Caller, path: str, now_s: float) -> None:
        """Count a request.

        Raises:
            RateLimited: the key has begun too many; it says for how long.
        """
        rate = caller.limits.rate_per_s
        if rate is None or path in FREE:
            return
        most = max(1.0, rate)
        bucket = self._buckets.setdefault(caller.key_id, _Bucket(most, now_s))
        self._buckets.move_to_end(caller.key_id)
        while len(self._buckets) > _KEPT_BUCKETS:
            self._buckets.popitem(last=False)
        bucket.tokens = min(most, bucket.tokens + (now_s - bucket.filled_s) * rate)
        bucket.filled_s = now_s
        if bucket.tokens < 1.0:
            wait_s = (1.0 - bucket.tokens) / rate
            raise RateLimited(
                f"this key may begin {rate:g} requests per second; try again in {wait_s:.2g} s",
                retry_after_s=wait_s,
            )
        bucket.tokens -= 1.0

    @contextmanager
    def reading(self, caller: Caller, size_bytes: int | None) -> Generator[None]:
        """Hold the place of a body while it is read and its request answered.

        Args:
            caller: Whose request it is.
            size_bytes: Of the body, as its headers state it; None if they do not: then the largest that it may have.

        Raises:
            Saturated: other bodies of the owner take the room.
        """
        limit, largest = caller.limits.max_waiting_bytes, caller.limits.largest_body_bytes
        if limit is None or largest is None:
            yield
            return
        # What is larger than it may be is dropped while it is read.
        size_bytes = largest if size_bytes is None else min(size_bytes, largest)
        taken = self._reading[caller.owner]
        if taken + size_bytes > limit:
            raise Saturated(
                f"requests of this key may take {limit} bytes together; {taken} are being read, and "
                f"{size_bytes} more do not fit; send them again when those are done"
            )
        self._reading[caller.owner] += size_bytes
        try:
            yield
        finally:
            self._reading[caller.owner] -= size_bytes
            if not self._reading[caller.owner]:
                del self._reading[caller.owner]
