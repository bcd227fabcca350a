"""Member: the driver's handle on one rank, whatever started it; the only thing that launchers implement differently."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from lilo_miles_backend.launchers.mailboxes import Mailbox


class LinkLost(Exception):
    """No answer can come any more: the rank's process is gone. How it went says `Member.fate`."""


class Member(Protocol):
    """One rank."""

    @property
    def rank(self) -> int:
        """Its number."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process; None while unknown."""
        ...

    @property
    def node(self) -> str:
        """Where it runs, for people."""
        ...

    def post(self, mailbox: Mailbox, frame: bytes) -> Future[bytes]:
        """Queue one command, after those posted before; never waits.

        The future has the frame of the answer, or `LinkLost`.
        """
        ...

    def fate(self) -> str | None:
        """How its process ended, in words that follow the rank's name; None while it lives."""
        ...

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended`, from any thread, when the process has ended; at once if it has already."""
        ...

    def kill(self) -> None:
        """Order the end of the process; never waits; may be called more than once, and when it is gone."""
        ...

    def wait_ended(self, limit_s: float) -> bool:
        """Whether its end is known within `limit_s`."""
        ...
