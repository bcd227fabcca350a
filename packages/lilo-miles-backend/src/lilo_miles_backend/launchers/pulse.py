"""Pulse: what each rank last said about its progress, and which of them say nothing any more.

Ranks answer beside their work, in a thread of their own: one that computes or waits in a collective has a pulse, one
that is stopped or cut off has none. Asked by the driver's watch; read by whoever waits for a command.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from concurrent.futures import Future

from lilo_engine.commands import frames
from lilo_engine.commands.command import RankProgress

from lilo_miles_backend.launchers.first_cause import Evidence, Weight, name_of
from lilo_miles_backend.launchers.mailboxes import Beat, Done
from lilo_miles_backend.launchers.member import Member

FRESH_S = 0.2
"""How long an answer is waited for when somebody asks; older news is given otherwise."""


class Pulse:
    """Of all ranks of a group."""

    def __init__(self, members: Sequence[Member], silence_s: float) -> None:
        self._members = tuple(members)
        self._silence_s = silence_s
        self._heard_s = [time.monotonic()] * len(members)
        self._views: list[RankProgress | None] = [None] * len(members)
        self._beats: list[Future[bytes] | None] = [None] * len(members)

    def ask(self) -> None:
        """Ask every rank that owes no answer; never waits."""
        frame = frames.encode(Beat())
        for member in self._members:
            if self._beats[member.rank] is None:
                beat = member.post("beat", frame)
                self._beats[member.rank] = beat
                beat.add_done_callback(lambda answer, rank=member.rank: self._hear(rank, answer))

    def read(self) -> tuple[RankProgress, ...]:
        """The newest news of every rank that told any, `FRESH_S` old at most if it answers."""
        self.ask()
        concurrent.futures.wait([beat for beat in self._beats if beat is not None], FRESH_S)
        now = time.monotonic()
        return tuple(
            RankProgress(
                rank=view.rank,
                pid=view.pid,
                completed_commands=view.completed_commands,
                running=view.running,
                age_s=view.age_s + now - heard_s,
            )
            for view, heard_s in zip(self._views, self._heard_s, strict=True)
            if view is not None
        )

    def silent(self, members: Sequence[Member], command: str) -> list[Evidence]:
        """Those of `members`, which have not answered a command yet, that told nothing for longer than the limit."""
        now = time.monotonic()
        return [
            Evidence(
                weight=Weight.SILENT,
                at_s=time.time() - (now - self._heard_s[member.rank]),
                words=(
                    f"{name_of(member.rank, member.pid, member.node)} told no progress for "
                    f"{now - self._heard_s[member.rank]:.1f} s (rank_silence_s is {self._silence_s:g}): it is "
                    f"stopped or cut off, and {command} waits for it"
                ),
            )
            for member in members
            if now - self._heard_s[member.rank] > self._silence_s
        ]

    def doing(self, rank: int) -> str:
        """A rank and what it last was in, in words."""
        member = self._members[rank]
        return f"{name_of(rank, member.pid, member.node)} in {self._running(rank)}"

    def _running(self, rank: int) -> str:
        view = self._views[rank]
        return (view.running if view is not None else None) or "nothing yet"

    def _hear(self, rank: int, beat: Future[bytes]) -> None:
        self._beats[rank] = None
        if beat.cancelled() or beat.exception() is not None:
            return
        answer = frames.decode(beat.result())
        if isinstance(answer, Done):
            self._views[rank] = answer.value
            self._heard_s[rank] = time.monotonic()
