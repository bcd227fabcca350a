"""Asynchronous publication: saves run one after the other in a thread while the training goes on.

    main thread     submit 1 ....... submit 2 waits for 1 ....... submit 3 waits for 2 ... close waits for all
    save thread     [-- save 1 --]  [-- save 2 --------------]   [-- save 3 --]

What is kept:
- Order: save n+1 begins after save n has ended.
- Back-pressure: `submit` waits for the save `max_in_flight` before it, so that captures cannot pile up.
- Errors are heard: from `result`, or at the `submit` that waits for the failed save, at `close`, and at the end of the
  process, which then exits with 1. Which submit raises depends on numbers alone, never on speed: all ranks raise at the
  same one.
- The process does not end before the saves have.

A save uses its own `Group`: collectives of two threads on one group would mix.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from lilo_volume.errors import NotFinished, VolumeError
from lilo_volume.log import warn

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 1800.0
"""As long as the slowest save may take; the limit of every wait here."""


class Pending(Generic[T]):
    """A save that was handed in."""

    def __init__(self, label: str, number: int) -> None:
        """Made by `AsyncPublisher.submit`."""
        self.label = label
        """As it was submitted, for messages."""
        self.number = number
        """Which save of its publisher it is, from 0."""
        self._ended = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._heard = False

    @property
    def ended(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._ended.is_set()

    def result(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """What the save returned. With several ranks, call it on all of them or on none.

        Raises:
            NotFinished: it still runs, or waits.
            BaseException: what the save raised; after this it is not raised again elsewhere.
        """
        self.wait(timeout_s)
        if self._error is not None:
            self._heard = True
            raise self._error
        return cast("T", self._value)

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, well or not.

        Raises:
            NotFinished: it has not.
        """
        if not self._ended.wait(timeout=max(0.0, timeout_s)):
            raise NotFinished(f"save {self.label!r} did not end within {timeout_s:g} s")

    @property
    def unheard(self) -> BaseException | None:
        """Its error, if nobody has been told of it yet."""
        return None if self._heard else self._error

    def hear(self) -> BaseException | None:
        """Take its error, if nobody has been told of it yet."""
        error = self.unheard
        self._heard = True
        return error

    def run(self, action: Callable[[], T]) -> None:
        """Do it; for the save thread only."""
        try:
            self._value = action()
        except BaseException as error:  # the thread must go on, and whoever asks must hear it
            self._error = error
            warn(
                "save %r failed in the background: %s: %s", self.label, type(error).__name__, error
            )
        finally:
            self._ended.set()


class AsyncPublisher:
    """Runs saves in a thread of its own; as a context manager it closes at the end."""

    def __init__(
        self, *, max_in_flight: int = 1, exit_timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Nothing runs before the first `submit`.

        Args:
            max_in_flight: how many saves may be unfinished; each holds its captured state in memory.
            exit_timeout_s: how long the end of the process waits for them.
        """
        assert max_in_flight >= 1, f"max_in_flight is {max_in_flight}; expected at least 1"
        self._max_in_flight = max_in_flight
        self._exit_timeout_s = exit_timeout_s
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Pending[Any], Callable[[], Any]]] = deque()
        self._saves: deque[Pending[Any]] = deque()
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(
        self, action: Callable[[], T], *, label: str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Pending[T]:
        """Hand in a save: `action` begins an attempt, writes and publishes. Returns at once, or when it is its turn.

        Raises:
            BaseException: what an earlier save raised, if nobody has heard of it; then this one was not handed in.
            NotFinished: the save before it did not end in time; then this one was not handed in.
        """
        assert not self._closed, f"save {label!r}: this publisher is closed"
        self._settle(self._max_in_flight - 1, time.monotonic() + timeout_s)
        pending: Pending[T] = Pending(label, self._count)
        self._count += 1
        self._saves.append(pending)
        with self._changed:
            self._waiting.append((pending, action))
            self._changed.notify()
        if self._thread is None:
            _unclosed.append(self)
            # A daemon, since a save that hangs must not hang the process for ever; `_finish` waits for it.
            self._thread = threading.Thread(target=self._work, name="lilo-save", daemon=True)
            self._thread.start()
        return pending

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait for all saves. Again: nothing.

        Raises:
            BaseException: the first error that nobody has heard of; others are in its notes.
            NotFinished: a save did not end in time.
        """
        self._closed = True
        try:
            self._settle(0, time.monotonic() + timeout_s)
        finally:
            with self._changed:
                self._changed.notify()
            if self in _unclosed and not self._saves:
                _unclosed.remove(self)

    def _settle(self, max_left: int, deadline: float) -> None:
        """Wait for the oldest saves until `max_left` are not accounted for; raise what nobody has heard of."""
        errors: list[BaseException] = []
        while len(self._saves) > max_left:
            self._saves[0].wait(deadline - time.monotonic())
            if (error := self._saves.popleft().hear()) is not None:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"a later save failed too: {type(other).__name__}: {other}")
            raise errors[0]

    def _work(self) -> None:
        """The save thread. Waits for: saves, or the end."""
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                pending, action = self._waiting.popleft()
            pending.run(action)
            del pending, action  # or the captured state would stay until the next save

    def finish_at_exit(self) -> bool:
        """Wait for all saves at the end of the process; whether all of them are known to be good."""
        if self._process != os.getpid():
            return True  # a fork: the saves are the parent's
        try:
            self.close(self._exit_timeout_s)
        except (VolumeError, Exception, SystemExit, KeyboardInterrupt) as error:
            warn(
                "a save in the background failed and nobody was told; exit code 1: %s: %s",
                type(error).__name__,
                error,
            )
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as late:
            error.add_note(f"a save in the background failed too: {type(late).__name__}: {late}")


_unclosed: list[AsyncPublisher] = []
_failed = False


def _finish() -> None:
    """Before the interpreter gives up its threads: let the saves end."""
    global _failed
    for publisher in _unclosed.copy():
        if not publisher.finish_at_exit():
            _failed = True


def _exit() -> None:
    """Last of all: no exit hook can change the exit code, so the process ends here if a save was lost."""
    if not _failed:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    os._exit(1)


atexit.register(_exit)
# Hooks run last in, first out: that of the thread pools must be there before ours.
importlib.import_module("concurrent.futures.thread")
# Thread pools refuse work once the interpreter waits for its threads, and a save may use one: so the saves must end
# before that, which only this hook allows; it is what the standard library's own pools use.
threading._register_atexit(_finish)  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
