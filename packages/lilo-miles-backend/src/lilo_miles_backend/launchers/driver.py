"""DrivenRanks: all ranks of a trainer seen from its driver: one core for every launcher that has processes.

    train(command)      the same frame into every rank's mailbox; rank 0's answer is the answer
    a rank fails         evidence is gathered, the first cause chosen, all ranks ended, everybody who waits is told

A group is never repaired: what its ranks hold after a failure cannot be known. Nothing is sent to it any more, its
processes are ended and what they held given back before anybody is told.

    a command    waits for: answers of all ranks     unblocked by: them, a fault, an end, silence, the limit
    the watch    waits for: BEAT_S, an end           unblocked by: a member's end, close
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from contextlib import nullcontext
from typing import Any, cast

from lilo_definitions import Definition
from lilo_engine.commands import frames
from lilo_engine.commands.command import Published, RankProgress
from lilo_engine.errors import BackendLost, LiloError

from lilo_miles_backend.launchers.agreement import check_agreement
from lilo_miles_backend.launchers.answers import Answer, Disagreement, any_refused, settle
from lilo_miles_backend.launchers.first_cause import (
    Evidence,
    Weight,
    first_cause,
    of_end,
    of_fault,
    of_limit,
)
from lilo_miles_backend.launchers.limits import DriverLimits, command_words
from lilo_miles_backend.launchers.mailboxes import (
    ORDERED,
    Begin,
    Leave,
    Mailbox,
    Prepare,
    RankFault,
)
from lilo_miles_backend.launchers.member import LinkLost, Member
from lilo_miles_backend.launchers.pulse import Pulse
from lilo_miles_backend.launchers.ranks import Reply
from lilo_miles_backend.rank_commands import Fetch, Persist, RankInfo, TrainCommand

_log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two questions for progress."""
GATHER_S = 1.0
"""After a failure that another one may have caused: how long evidence of that one is waited for."""
GATHER_PEER_S = 6.0
"""The same where all that is known is that a peer went away: a machine that died with its rank is told of by Ray's health
checks alone, some 4 s later."""
LOOK_S = 0.05
"""Between looks for such evidence."""
END_LIMIT_S = 4.0
"""From the order to end all ranks until that is known: only a process stuck in the kernel takes longer."""
DISAGREE_S = 5.0
"""After one rank refused a command: ranks refuse before any collective, so that all of them do at once or none."""


class DrivenRanks:
    """Implements `Ranks` over members."""

    def __init__(
        self,
        definition: Definition,
        members: Sequence[Member],
        limits: DriverLimits,
        facts: Mapping[str, str],
        give_back: Callable[[], None],
    ) -> None:
        """Take over members whose processes run; `begin` follows.

        Args:
            definition: Of the trainer.
            members: In rank order.
            limits: Of waits.
            facts: This process's, which the ranks' must equal.
            give_back: Ends whatever the launcher holds beside the processes; called once, when these were ended.
        """
        self._timeout_minutes = definition.limits.distributed_timeout_minutes
        self._members = tuple(members)
        self._limits = limits
        self._facts = facts
        self._give_back = give_back
        self._pulse = Pulse(members, limits.silence_s)
        self._order = {mailbox: threading.Lock() for mailbox in ORDERED}
        self._ending = threading.Lock()
        self._cause: str | None = None
        self._stir = threading.Event()
        self._lost = threading.Event()
        self._began = False
        self._info: tuple[RankInfo, ...] = ()
        for member in members:
            member.watch(self._stir.set)
        threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()

    def begin(self, rendezvous: str) -> None:
        """Have all ranks meet and load; returns when each has told what it is.

        Raises:
            LiloError: the ranks refused; none is left.
            BackendLost: one failed, or they differ in what must be equal; none is left.
        """
        try:
            self._exchange("train", Prepare(), self._limits.begin())
            answers = self._exchange("train", Begin(rendezvous=rendezvous), self._limits.begin())
            self._info = tuple(cast(list[RankInfo], answers))
            check_agreement(self._info, self._facts)
        except LiloError as error:
            self._lose(error.message)
            raise
        self._began = True

    def info(self) -> tuple[RankInfo, ...]:
        """What each rank found when it had started."""
        return self._info

    def train(self, command: TrainCommand) -> Reply:
        """Broadcast a command; rank 0's reply.

        Raises:
            LiloError: it cannot be done, and the ranks agree on that; they go on.
            BackendLost: the group is lost; names the first cause.
        """
        return cast(Reply, self._exchange("train", command, self._limits.command(command))[0])

    def persist(self, command: Persist) -> Published:
        """Publish a capture: a training state by all ranks, sampler weights by rank 0 alone.

        Raises:
            LiloError: it was not published; the ranks go on.
            BackendLost: the group is lost; names the first cause.
        """
        mailbox: Mailbox = "persist" if command.destination.kind == "weights" else "publish"
        return cast(Published, self._exchange(mailbox, command, self._limits.command(command))[0])

    def fetch(self, command: Fetch) -> None:
        """Have every rank read its part of what will be loaded, beside `train`.

        Raises:
            LiloError: it cannot be loaded; the ranks go on.
            BackendLost: the group is lost; names the first cause.
        """
        self._exchange("persist", command, self._limits.command(command))

    def progress(self) -> tuple[RankProgress, ...]:
        """How far each rank has come; a rank that does not answer at once is told with what it last said.

        Raises:
            BackendLost: the group is lost; names the first cause.
        """
        if self._lost.is_set():
            raise BackendLost(self._cause)
        return self._pulse.read()

    def wait_lost(self) -> str:
        """Return when the group is lost: the first cause. After an orderly close it never returns."""
        self._lost.wait()
        assert self._cause is not None
        return self._cause

    def close(self) -> None:
        """Have the ranks leave their groups, then end them; bounded."""
        with self._ending:
            if self._cause is not None:
                return
            self._cause = "it was closed"
            if self._began:
                frame = frames.encode(Leave())
                leaving = [member.post("train", frame) for member in self._members]
                concurrent.futures.wait(leaving, self._limits.close_s)
            self._end()

    # Commands.

    def _exchange(
        self, mailbox: Mailbox, command: object, limit: tuple[float, str]
    ) -> list[object]:
        """Post to every member that has the mailbox: their values in rank order."""
        members = self._members[:1] if mailbox == "publish" else self._members
        frame = frames.encode(command)
        with self._order.get(mailbox, nullcontext()):
            if self._cause is not None:
                raise BackendLost(self._cause)
            posted = {member.post(mailbox, frame): member for member in members}
        answers = self._gather(mailbox, command, posted, limit)
        try:
            return settle(mailbox, answers)
        except Disagreement as error:
            raise self._lose(
                f"the ranks disagree about {command_words(command)}: {error}"
            ) from error

    def _gather(
        self,
        mailbox: Mailbox,
        command: object,
        posted: Mapping[Future[bytes], Member],
        limit: tuple[float, str],
    ) -> dict[int, Answer]:
        """Every member's answer, by rank; whatever goes wrong loses the group."""
        limit_s, words = limit
        end_s = time.monotonic() + limit_s
        answers: dict[int, Answer] = {}
        pending = set(posted)
        while pending:
            wait_s = max(0.0, min(end_s - time.monotonic(), BEAT_S))
            done, pending = concurrent.futures.wait(pending, wait_s, FIRST_COMPLETED)
            waiting = [posted[future] for future in pending]
            if faults := self._take(done, posted, answers, waiting):
                raise self._fail(command, faults)
            if waiting and any_refused(mailbox, answers) and limit_s > DISAGREE_S:
                said = "; ".join(f"rank {rank}: {one}" for rank, one in answers.items())
                limit_s, words = DISAGREE_S, f"{DISAGREE_S:g} s after others had refused it: {said}"
                end_s = min(end_s, time.monotonic() + DISAGREE_S)
            if self._began and (silent := self._pulse.silent(waiting, command_words(command))):
                raise self._fail(command, silent)
            if waiting and time.monotonic() >= end_s:
                late = [self._pulse.doing(member.rank) for member in waiting]
                raise self._fail(command, [of_limit(command_words(command), words, late)])
        return answers

    def _take(
        self,
        done: set[Future[bytes]],
        posted: Mapping[Future[bytes], Member],
        answers: dict[int, Answer],
        waiting: Sequence[Member],
    ) -> list[Evidence]:
        """Keep the answers that have come; evidence of what is no answer."""
        faults: list[Evidence] = []
        for future in done:
            member = posted[future]
            try:
                answer = cast(Any, frames.decode(future.result()))
            except LinkLost:
                faults.append(of_end(member))
                continue
            if isinstance(answer, RankFault):
                _log.error("rank %d: %s\n%s", answer.rank, answer.error, answer.trace)
                others = [self._pulse.doing(other.rank) for other in waiting]
                faults.append(of_fault(answer, self._timeout_minutes, others))
            answers[member.rank] = answer
        return faults

    # Failure.

    def _fail(self, command: object, faults: list[Evidence]) -> BackendLost:
        """Lose the group for the first cause of what is known, and of what is learned in a moment."""
        only_peers = all(one.weight is Weight.PEER for one in faults)
        end_s = time.monotonic() + (GATHER_PEER_S if only_peers else GATHER_S)
        while not any(one.is_primary for one in faults) and time.monotonic() < end_s:
            if self._cause is not None:  # another command knew more
                return self._lose("")
            faults += [of_end(member) for member in self._members if member.fate() is not None]
            self._stir.wait(LOOK_S)
        for one in faults:
            _log.error("in %s: %s", command_words(command), one.words)
        return self._lose(first_cause(faults))

    def _lose(self, cause: str) -> BackendLost:
        """End the group, once; the error with the first cause there was."""
        with self._ending:
            if self._cause is None:
                self._cause = cause
                _log.error("the ranks are lost: %s", cause)
                self._end()
                self._lost.set()
            return BackendLost(self._cause)

    def _end(self) -> None:
        for member in self._members:
            member.kill()
        end_s = time.monotonic() + END_LIMIT_S
        for member in self._members:
            if not member.wait_ended(max(0.0, end_s - time.monotonic())):
                _log.error("%s was told to end and is not known to", self._pulse.doing(member.rank))
        self._give_back()
        self._stir.set()

    def _watch(self) -> None:
        """Ask for progress, and notice ends when no command waits for them."""
        while self._cause is None:
            ended = [of_end(member) for member in self._members if member.fate() is not None]
            if ended:
                self._lose(first_cause(ended))
                return
            self._pulse.ask()
            self._stir.wait(BEAT_S)
            self._stir.clear()
