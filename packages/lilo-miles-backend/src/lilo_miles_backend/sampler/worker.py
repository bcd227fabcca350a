"""Worker: the one thread that runs torch for the sampler, and the way other threads talk to it.

It takes messages between steps of the batch and waits for one when there is nothing to do. An error that `batch.py`
did not contain fails the jobs that were in the batch; the thread itself goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from lilo_engine.errors import CommandFailed, Unavailable
from lilo_engine.sampling.engine import SamplerHealth

from lilo_miles_backend.sampler.batch import Batch

Message: TypeAlias = Callable[[Batch], None]

_log = logging.getLogger(__name__)


class Worker:
    """Runs a batch in a thread of its own."""

    def __init__(
        self, batch: Batch, *, num_threads: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread.

        Args:
            batch: what generates; no other thread touches it from now on.
            num_threads: torch's, for the operations inside one step.
            now: clock in seconds.
        """
        self._batch = batch
        self._num_threads = num_threads
        self._now = now
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._progress_at = now()
        self._counts = (0, 0, 0)
        self._thread = threading.Thread(target=self._run, name="lilo-sampler", daemon=True)
        self._thread.start()

    def post(self, message: Message) -> None:
        """Have `message` called with the batch, in the torch thread, before the next step."""
        running, waiting, _ = self._counts
        if not (running or waiting or self._messages.qsize()):
            # Progress is measured from the beginning of work: an idle hour is no hour without progress.
            self._progress_at = self._now()
        self._messages.put(message)

    def health(self) -> SamplerHealth:
        """Progress, readable from any thread."""
        running, waiting, generated = self._counts
        waiting += self._messages.qsize()
        return SamplerHealth(
            running=running,
            waiting=waiting,
            generated_tokens=generated,
            age_s=self._now() - self._progress_at if running or waiting else 0.0,
        )

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step it is in; what is left fails. Returns whether it ended in time."""
        self._messages.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while self._take_messages():
            if not self._batch.busy:
                continue
            try:
                self._batch.step()
            except Exception as error:  # the thread must outlive any step
                _log.exception("a step of the sampler failed")
                self._batch.fail_all(CommandFailed(f"a step of the sampler failed: {error}"))
            self._note_progress()
        self._batch.fail_all(Unavailable("the sampler is closing; try again when it is back"))

    def _take_messages(self) -> bool:
        """Handle what has come, waiting for something if the batch is idle. False: stop."""
        wait = not self._batch.busy
        while True:
            try:
                message = self._messages.get(block=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            message(self._batch)
            self._note_progress()
            wait = False

    def _note_progress(self) -> None:
        # One tuple, so that other threads never read numbers of two different steps.
        batch = self._batch
        self._counts = (batch.num_running, batch.num_waiting, batch.generated_tokens)
        self._progress_at = self._now()
