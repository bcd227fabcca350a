"""Trainers that misbehave, for child processes: found by the entry points beside this file, through PYTHONPATH."""

import os
import signal
import sys
import threading
import time

from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.errors import BackendLost

CAUSE = "rank 1 on host b (pid 7) raised OutOfMemoryError: 80 GiB are not enough"


class LosesARank(MemoryBackend):
    """One of its ranks fails in a step, and it says so."""

    def optim_step(self, model_id, params):
        raise BackendLost(CAUSE)


class LosesANodeWhileIdle(MemoryBackend):
    """A node goes when nothing is asked: after its first capture."""

    def __init__(self, config):
        super().__init__(config)
        self._gone = threading.Event()

    def persist(self, capture_id, destination):
        published = super().persist(capture_id, destination)
        self._gone.set()
        return published

    def wait_lost(self):
        self._gone.wait()
        return CAUSE


class Crashes(MemoryBackend):
    """A step ends the process below Python, after a last word."""

    def optim_step(self, model_id, params):
        print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Slow(MemoryBackend):
    """A pass takes much longer than any limit, a little at a time; a step stands still."""

    def forward_backward(self, batch):
        for _ in range(12):
            time.sleep(0.1)
            self._done("a microbatch")
        return super().forward_backward(batch)

    def optim_step(self, model_id, params):
        threading.Event().wait()


def light_ranks(config):
    """The real driver over ranks that are real processes with a real process group, and no model."""
    from lilo_miles_backend import MilesBackend
    from lilo_miles_backend.config import BackendSettings

    settings = BackendSettings(rank_class="tests.cluster.ordered_rank:OrderedRank")
    BackendSettings.from_environment = lambda: settings
    return MilesBackend(config)
