"""View: the control plane as one caller sees it. Routes reach what a client names through this, and nothing else.

What is not the caller's is answered with the same words as what is not there, so that nothing tells the two apart. Who may
do what is decided in `access.py`; ids are taken apart in `operations/ids.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lilo_engine.control.access import Caller, may_read, may_watch, owners_of, owns
from lilo_engine.control.checkpoints import Entry, no_checkpoint
from lilo_engine.control.control import Control
from lilo_engine.control.runs import Page, no_run
from lilo_engine.control.sampling_sessions import SamplingSession, no_sampler, target_of
from lilo_engine.control.session_search import Summary, Wanted
from lilo_engine.control.sessions import no_session
from lilo_engine.control.tables import RunRow, SessionRow
from lilo_engine.errors import Gone, NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.roster import no_such_request
from lilo_engine.sampling.residents import AdapterVersion


@dataclass(frozen=True, slots=True)
class View:
    """What one caller may see, and change."""

    control: Control
    caller: Caller

    # Sessions.

    async def check_session(self, session_id: str) -> None:
        """Refuse a session that is not the caller's.

        Raises:
            NotFound: as for one that never was.
        """
        owner = await self.control.sessions.owner(session_id)
        if owner is None or not owns(self.caller, owner):
            raise NotFound(no_session(session_id))

    async def touch_session(self, session_id: str) -> None:
        """Note that the client of a session was heard of.

        Raises:
            NotFound: see `check_session`.
            Gone: it ended.
        """
        await self.check_session(session_id)
        await self.control.sessions.touch(session_id, self.control.clock())

    async def session(self, session_id: str) -> SessionRow:
        """The record of a session.

        Raises:
            NotFound: see `check_session`.
        """
        await self.check_session(session_id)
        return await self.control.sessions.get(session_id)

    async def sessions(self, limit: int, offset: int) -> list[str]:
        """Ids, newest first."""
        return await self.control.sessions.listed(owners_of(self.caller), limit, offset)

    async def search(self, wanted: Wanted) -> tuple[list[Summary], bool]:
        """A page of sessions, newest first, and whether there is more."""
        own = replace(wanted, owners=owners_of(self.caller))
        return await self.control.session_search.find(own)

    # Models and runs.

    async def check_model(self, model_id: str) -> None:
        """Refuse a model that is not the caller's, resident or not.

        Raises:
            NotFound: as for one that never was.
        """
        if not owns(self.caller, await self.control.owner_of_run(model_id)):
            raise NotFound(f"there is no model {model_id!r} here; create a training client first")

    async def run(self, run_id: str) -> RunRow:
        """A run, live or ended.

        Raises:
            NotFound: as for one that never was.
        """
        row = await self.control.runs.find(run_id)
        if row is None or not owns(self.caller, row.owner):
            raise NotFound(no_run(run_id))
        return row

    async def runs(self, limit: int, offset: int) -> Page:
        """Runs, the one asked for most recently first."""
        return await self.control.runs.listed(owners_of(self.caller), limit, offset)

    async def watches(self, run_id: str) -> bool:
        """Whether the caller may see in a console what a run does."""
        if self.caller.operator:
            return True
        return may_watch(self.caller, await self.control.owner_of_run(run_id))

    # Checkpoints.

    async def checkpoint(self, ref: CheckpointRef) -> Entry:
        """A checkpoint to read: the caller's, or a public one.

        Raises:
            NotFound: as for one that never was; the message lists what the caller may see of the run.
        """
        entry = await self.control.checkpoints.find(ref)
        if entry is None or not self._reads(entry):
            raise NotFound(no_checkpoint(ref, await self._readable_of(ref.run_id)))
        return entry

    async def own_checkpoint(self, ref: CheckpointRef) -> Entry:
        """A checkpoint to change.

        Raises:
            NotFound: as for one that never was, also when it is public.
        """
        entry = await self.control.checkpoints.find(ref)
        if entry is None or not owns(self.caller, entry.owner):
            raise NotFound(no_checkpoint(ref, await self._readable_of(ref.run_id)))
        return entry

    async def check_source(self, ref: CheckpointRef) -> None:
        """Refuse to load what the caller may not read; what its own run may be about to save passes.

        Raises:
            NotFound: see `checkpoint`.
        """
        if not owns(self.caller, await self.control.owner_of_run(ref.run_id)):
            await self.checkpoint(ref)

    async def checkpoints_of_run(self, run_id: str) -> list[Entry]:
        """Named checkpoints of a run, newest first; of a stranger's the public ones.

        Raises:
            NotFound: as for one that never was.
        """
        entries = await self._readable_of(run_id)
        if not entries:
            await self.run(run_id)
        return entries

    async def checkpoints(self, limit: int, offset: int) -> tuple[list[Entry], int]:
        """Named checkpoints of the caller, newest first, and how many there are."""
        return await self.control.checkpoints.listed(owners_of(self.caller), limit, offset)

    async def _readable_of(self, run_id: str) -> list[Entry]:
        return [e for e in await self.control.checkpoints.of_run(run_id) if self._reads(e)]

    def _reads(self, entry: Entry) -> bool:
        return may_read(self.caller, entry.owner, public=entry.public)

    # Sampling sessions and futures.

    async def sampling_session(self, sampling_session_id: str) -> SamplingSession:
        """A sampling session, also one that can no longer be sampled from.

        Raises:
            NotFound: as for one that never was.
        """
        if not owns(self.caller, await self.control.owner_of_sampler(sampling_session_id)):
            raise NotFound(no_sampler(sampling_session_id))
        return await self.control.sampling_sessions.get(sampling_session_id)

    async def target(self, session: SamplingSession) -> AdapterVersion | None:
        """What a sampling session of the caller samples from; None = the base model.

        Raises:
            Gone: it was removed, or is not public any more.
        """
        entry = await self.control.sampling_sessions.entry(session)
        if entry is None:
            return None
        if not self._reads(entry):
            raise Gone(f"the snapshot {entry.ref} is not public any more; sample from another one")
        return target_of(entry)

    async def check_request(self, request_id: str) -> None:
        """Refuse the future of an operation (`{model}:{number}`) that is not the caller's.

        Raises:
            NotFound: as for one that never was.
        """
        self._check_future(
            request_id, await self.control.owner_of_run(request_id.rpartition(":")[0])
        )

    async def check_sample(self, request_id: str, sampling_session_id: str) -> None:
        """Refuse the future of a sample that is not the caller's.

        Raises:
            NotFound: as for one that never was.
        """
        self._check_future(request_id, await self.control.owner_of_sampler(sampling_session_id))

    def _check_future(self, request_id: str, owner: str) -> None:
        if not owns(self.caller, owner):
            raise no_such_request(request_id)
