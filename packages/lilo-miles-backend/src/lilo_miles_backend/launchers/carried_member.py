"""CarriedMember: what members of every launcher share: a queue per mailbox, threads that carry, one end.

    post -> queue -> carrier thread -> exchange (of the launcher) -> the answer's future

One thread per place of a mailbox carries one command at a time, so that order holds whatever the transport does with
calls that overlap.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from lilo_miles_backend.launchers.mailboxes import Mailbox
from lilo_miles_backend.launchers.member import LinkLost

FATE_LIMIT_S = 5.0
"""After a broken link: how it came to that is known within this."""


class CarriedMember(ABC):
    """Implements `Member` but for `pid` and `kill`."""

    def __init__(self, rank: int, node: str, places: Mapping[Mailbox, int]) -> None:
        """Prepare the mailboxes; `carry` opens them.

        Args:
            rank: Its number.
            node: Where it runs.
            places: How many commands of each mailbox may be under way at once.
        """
        self.rank = rank
        self.node = node
        self._places = dict(places)
        self._queues: dict[Mailbox, queue.SimpleQueue[_Posted | None]] = {
            mailbox: queue.SimpleQueue() for mailbox in places
        }
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._fate: str | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Of its process."""

    @abstractmethod
    def kill(self) -> None:
        """Order the end of the process."""

    @abstractmethod
    def exchange(self, mailbox: Mailbox, place: int, frame: bytes) -> bytes:
        """Send one command and wait for its answer, however long that takes.

        Raises:
            LinkLost: no answer can come; the fate follows within `FATE_LIMIT_S`.
        """

    def post(self, mailbox: Mailbox, frame: bytes) -> Future[bytes]:
        """Queue one command."""
        posted = _Posted(frame)
        # Looked at under the lock: what is queued after the end would be taken by nobody.
        with self._lock:
            if self._fate is None:
                self._queues[mailbox].put(posted)
                return posted.answer
        posted.answer.set_exception(LinkLost())
        return posted.answer

    def fate(self) -> str | None:
        """How the process ended."""
        return self._fate

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` at the end of the process."""
        with self._lock:
            if self._fate is None:
                self._watchers.append(ended)
                return
        ended()

    def carry(self) -> None:
        """Open the mailboxes."""
        for mailbox, number in self._places.items():
            for place in range(number):
                threading.Thread(
                    target=self._carry,
                    args=(mailbox, place),
                    name=f"rank-{self.rank}-{mailbox}",
                    daemon=True,
                ).start()

    def end(self, fate: str) -> None:
        """The process has ended, in words that follow the rank's name; the first fate is kept."""
        with self._lock:
            if self._fate is not None:
                return
            self._fate = fate
            watchers = list(self._watchers)
        self._ended.set()
        for ended in watchers:
            ended()
        for mailbox, waiting in self._queues.items():
            _refuse_all(waiting)
            for _ in range(self._places[mailbox]):
                waiting.put(None)

    def wait_ended(self, limit_s: float) -> bool:
        """Whether its end is known within `limit_s`."""
        return self._ended.wait(limit_s)

    def _carry(self, mailbox: Mailbox, place: int) -> None:
        waiting = self._queues[mailbox]
        while True:
            posted = waiting.get()
            if posted is None:
                return
            try:
                answer = self.exchange(mailbox, place, posted.frame)
            except LinkLost as error:
                self._ended.wait(FATE_LIMIT_S)
                posted.answer.set_exception(error)
                continue
            posted.answer.set_result(answer)


class _Posted:
    __slots__ = ("answer", "frame")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.answer: Future[bytes] = Future()


def _refuse_all(waiting: queue.SimpleQueue[_Posted | None]) -> None:
    while True:
        try:
            posted = waiting.get_nowait()
        except queue.Empty:
            return
        if posted is not None:
            posted.answer.set_exception(LinkLost())


def places_of(rank: int, publication_workers: int) -> dict[Mailbox, int]:
    """The mailboxes of a rank, and how many commands of each may be under way."""
    places: dict[Mailbox, int] = {"train": 1, "persist": 1, "beat": 1}
    if rank == 0:
        places["publish"] = publication_workers
    return places
