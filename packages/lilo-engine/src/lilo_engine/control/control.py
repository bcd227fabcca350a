"""Control: the parts of the control plane that share one database, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from lilo_volume import Volume

from lilo_engine.control.access import NOBODY
from lilo_engine.control.checkpoints import Checkpoints
from lilo_engine.control.journal import ControlJournal
from lilo_engine.control.keys import Door, Keys
from lilo_engine.control.links import Links
from lilo_engine.control.records import Records
from lilo_engine.control.runs import Runs
from lilo_engine.control.sampling_sessions import SamplingSessions
from lilo_engine.control.session_search import SessionSearch
from lilo_engine.control.sessions import Sessions
from lilo_engine.errors import NotFound
from lilo_engine.operations.ids import owner_of_direct, session_of, session_of_sampler
from lilo_engine.operations.reference import CheckpointRef

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Sessions, runs, checkpoints, sampling sessions and keys of one server."""

    records: Records
    keys: Keys
    sessions: Sessions
    runs: Runs
    checkpoints: Checkpoints
    sampling_sessions: SamplingSessions
    session_search: SessionSearch
    links: Links
    journal: ControlJournal
    clock: Callable[[], float]
    """Unix seconds."""

    @property
    def door(self) -> Door:
        """The keys as the HTTP layer asks for them."""
        return Door(self.keys, self.clock)

    @classmethod
    def of_engine(cls, records: Records, volume: Volume, clock: Callable[[], float]) -> Control:
        """Open the control plane in the one process that has the engine: make the index equal to the volume.

        What an earlier engine left running is over; sessions go on.
        """
        control = cls.of_front(records, volume, clock)
        control.checkpoints.take_over()
        control.sessions.take_over(clock())
        control.runs.take_over()
        return control

    @classmethod
    def of_front(cls, records: Records, volume: Volume, clock: Callable[[], float]) -> Control:
        """Open the control plane in a process without the engine; nothing is changed."""
        runs = Runs(records)
        checkpoints = Checkpoints(records, volume)
        sampling_sessions = SamplingSessions(records, checkpoints)
        return cls(
            records=records,
            keys=Keys(records),
            sessions=Sessions(records),
            runs=runs,
            checkpoints=checkpoints,
            sampling_sessions=sampling_sessions,
            session_search=SessionSearch(records),
            links=Links(records),
            journal=ControlJournal(
                runs=runs,
                checkpoints=checkpoints,
                sampling_sessions=sampling_sessions,
                clock=clock,
            ),
            clock=clock,
        )

    async def owner_of_run(self, run_id: str) -> str:
        """Whose a run is; `NOBODY` if there never was such a run."""
        owner = await self.sessions.owner(session_of(run_id))
        if owner is None:
            # Sessions are forgotten some day, runs are not.
            row = await self.runs.find(run_id)
            owner = NOBODY if row is None else row.owner
        return owner

    async def owner_of_sampler(self, sampling_session_id: str) -> str:
        """Whose a sampling session is; `NOBODY` if there never was such a one, or its session is forgotten."""
        owner = owner_of_direct(sampling_session_id)
        if owner is None:
            owner = await self.sessions.owner(session_of_sampler(sampling_session_id))
        return NOBODY if owner is None else owner

    async def delete_checkpoint(self, ref: CheckpointRef, *, missing_ok: bool = True) -> None:
        """Remove a checkpoint; sampling sessions on it answer "gone" from now on.

        Raises:
            NotFound: it is not published, and `missing_ok` is false.
        """
        try:
            await self.checkpoints.delete(ref)
        except NotFound:
            if not missing_ok:
                raise
        self.sampling_sessions.forget(ref)
