"""RankHost: one rank inside its own process: takes commands as frames, gives answers as frames, never raises.

Not a transport: `rank_process.py` feeds it from sockets, `cluster/actor.py` from Ray. It keeps what a rank says about its
failure: the first thing that went wrong is worth more than all that follows from it.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from lilo_engine.commands import frames
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import RankProgress
from lilo_engine.errors import BackendLost, LiloError

from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.facts import local_facts
from lilo_miles_backend.launchers.mailboxes import (
    Beat,
    Begin,
    Done,
    Leave,
    Prepare,
    RankFault,
)
from lilo_miles_backend.rank_commands import Fetch, Persist, RankInfo, TrainCommand
from lilo_miles_backend.ranks.place import RankPlace

if TYPE_CHECKING:
    from lilo_miles_backend.ranks.rank import Rank

_log = logging.getLogger(__name__)

TIMEOUT_WORDS = ("timed out", "timeout")
COLLECTIVE_WORDS = ("gloo", "nccl", "connection closed by peer", "processgroup")
"""How errors of torch.distributed are told from others: most of them are plain RuntimeErrors. Those of publishing
together have types of their own."""


class RankHost:
    """Answers the commands of one rank; each mailbox is served by threads of its own."""

    def __init__(self, config: BackendConfig, settings: BackendSettings, place: RankPlace) -> None:
        self._config = config
        self._settings = settings
        self._place = place
        self._rank: Rank | None = None
        self._started_s = time.monotonic()

    def answer(self, frame: bytes | bytearray | memoryview) -> bytes:
        """Run one command; its answer, whatever happened."""
        command = frames.decode(frame)
        try:
            return frames.encode(Done(value=self._run(command)))
        except LiloError as error:
            if not isinstance(error, BackendLost):
                return frames.encode(error)
            return frames.encode(self._fault(command, error))
        except BaseException as error:  # torch raises checkpoint errors that are no Exceptions
            _log.exception("rank %d failed in %s", self._place.rank, type(command).__name__)
            return frames.encode(self._fault(command, error))

    def _run(
        self, command: TrainCommand | Persist | Fetch | Prepare | Begin | Leave | Beat
    ) -> object:
        match command:
            case Prepare():
                self._class()
                return None
            case Beat():
                return self._progress()
            case Begin():
                return self._begin(command)
            case Leave():
                if self._rank is not None:
                    self._rank.close()
                return None
            case Persist() | Fetch():
                return self._started().persist(command)
            case _:
                return self._started().execute(command)

    def _begin(self, command: Begin) -> RankInfo:
        place = replace(self._place, rendezvous=command.rendezvous)
        self._rank = self._class()(self._config, self._settings, place)
        facts = local_facts(self._config, self._settings)
        return replace(self._rank.info(), node=place.node, facts=facts)

    def _class(self) -> Callable[..., Rank]:
        # Not at the top, so that a rank that cannot be imported says so instead of dying.
        module, _, name = self._settings.rank_class.partition(":")
        return getattr(import_module(module), name)

    def _started(self) -> Rank:
        assert self._rank is not None, "Begin is the first command of a rank"
        return self._rank

    def _progress(self) -> RankProgress:
        if self._rank is not None:
            return self._rank.progress()
        return RankProgress(
            rank=self._place.rank,
            pid=os.getpid(),
            completed_commands=0,
            running="Begin",
            age_s=time.monotonic() - self._started_s,
        )

    def _fault(self, command: object, error: BaseException) -> RankFault:
        return RankFault(
            rank=self._place.rank,
            pid=os.getpid(),
            node=self._place.node,
            command=type(command).__name__,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            collective=is_collective(error),
            timed_out=is_collective(error) and _mentions(error, TIMEOUT_WORDS),
            at_s=time.time(),
        )


def is_collective(error: BaseException) -> bool:
    """Whether a collective raised it, or what it was raised from. Pure."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__.startswith(("Dist", "PeerFailed", "RankLost")) or (
            isinstance(seen, RuntimeError) and _mentions(seen, COLLECTIVE_WORDS)
        ):
            return True
        seen = seen.__cause__
    return False


def _mentions(error: BaseException, words: tuple[str, ...]) -> bool:
    text = f"{error} {error.__cause__ or ''}".lower()
    return any(word in text for word in words)
