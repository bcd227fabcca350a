"""Lease: which engine the records belong to. One engine holds it, renews it, and stops when it finds that it does not.

    take: nobody holds it | given back | its process is known to be dead | its beat stood still for `EXPIRY_S`
    keep: one more beat every `RENEW_S`; lost when another epoch is there

No two clocks are compared: a contender watches the beat by its own clock, and a holder counts from before its last
renewal was sent. One that did not renew for `TRUST_S` answers nobody until it has. Each transaction of a holder reads
the epoch first (`Lease.guard`), so that one which was stopped and wakes after the lease was taken changes nothing.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.control.process_identity import is_dead, process_identity
from lilo_engine.control.records import Records
from lilo_engine.control.tables import LeaseRow
from lilo_engine.errors import LiloError, Unavailable

_log = logging.getLogger(__name__)

NAME = "engine"
"""There is one engine over a database."""
RENEW_S = 3.0
TRUST_S = 12.0
"""A holder that could not renew for so long, which is four renewals, does not answer until it has."""
EXPIRY_S = 15.0
"""A beat that stands still for so long is of a holder that has stopped by itself; above `TRUST_S` by the time of one
renewal that was under way."""
_LOOK_S = 0.25
"""Between looks at another one's beat."""


class LeaseLost(Unavailable):
    """This engine is no longer the one that the records belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A lease as the records have it."""

    epoch: int
    beat: int
    held: bool
    holder: str
    process: str
    address: str | None

    def __str__(self) -> str:
        """Who it is, in words."""
        where = "in its own process" if self.address is None else f"for fronts at {self.address}"
        return f"{self.holder} (epoch {self.epoch}, {where})"


def read_lease(session: Session) -> Holder | None:
    """The lease, whoever holds it; None when nobody ever did."""
    row = session.get(LeaseRow, NAME, populate_existing=True)
    if row is None:
        return None
    return Holder(
        epoch=row.epoch,
        beat=row.beat,
        held=row.held,
        holder=row.holder,
        process=row.process,
        address=row.address,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The lease of this process."""

    records: Records
    epoch: int
    holder: str
    lost: anyio.Event = field(default_factory=anyio.Event)
    """Set when it is lost; `reason` says how."""
    reason: str = ""
    _renewed_s: float = field(default_factory=time.monotonic)

    @classmethod
    def take(
        cls,
        records: Records,
        holder: str,
        *,
        address: str | None = None,
        expiry_s: float = EXPIRY_S,
    ) -> Lease:
        """Become the engine of these records; blocks until a silent holder's time is over.

        Args:
            records: every transaction of them is guarded from now on.
            holder: this engine, in words.
            address: where fronts reach it.
            expiry_s: how long a beat must have stood still.

        Raises:
            Unavailable: another engine holds it and lives; it is named.
        """
        seen = records.now(read_lease)
        watched_s = time.monotonic()
        while True:
            if seen is None or not seen.held or is_dead(seen.process):
                break
            if time.monotonic() - watched_s >= expiry_s:
                _log.warning("%s did not renew its lease for %g s", seen, expiry_s)
                break
            time.sleep(_LOOK_S)
            now = records.now(read_lease)
            if now is not None and now.held and (now.epoch, now.beat) != (seen.epoch, seen.beat):
                raise Unavailable(
                    f"these records belong to another engine, {now}, which is alive; stop it first, or use other records"
                )
            seen = now
        sent_s = time.monotonic()
        epoch = 1 if seen is None else seen.epoch + 1
        mine = Holder(
            epoch=epoch,
            beat=0,
            held=True,
            holder=holder,
            process=process_identity(os.getpid()),
            address=address,
        )
        if not records.now(lambda session: _replace(session, seen, mine)):
            raise Unavailable("another engine took these records at the same moment; try again")
        lease = cls(records=records, epoch=epoch, holder=holder, _renewed_s=sent_s)
        records.guard = lease.guard
        return lease

    def check(self) -> None:
        """See that answers may be given; costs a look at the clock.

        Raises:
            LeaseLost: another engine has it.
            Unavailable: it is too long ago that it was certainly held.
        """
        if self.reason:
            raise self._loss()
        age_s = time.monotonic() - self._renewed_s
        if age_s > TRUST_S:
            raise Unavailable(
                f"{self.holder} did not renew its lease on the records for {age_s:.0f} s, so that another engine may have "
                "taken it; try again"
            )

    def guard(self, session: Session) -> None:
        """See inside a transaction that it is held, and keep it until the transaction's end.

        Raises:
            LeaseLost: another engine has it.
        """
        query = sa.select(LeaseRow.epoch, LeaseRow.holder).where(LeaseRow.name == NAME)
        # FOR SHARE where there is such a thing: whoever takes the lease waits for this transaction.
        row = session.execute(query.with_for_update(read=True)).one_or_none()
        if row is not None and row.epoch == self.epoch:
            return
        if not self.reason:
            self.reason = (
                "the records were emptied"
                if row is None
                else f"{row.holder} took it (epoch {row.epoch})"
            )
            _log.error("%s", self._loss())
        raise self._loss()

    async def keep(self) -> None:
        """Renew it until it is lost, then set `lost`; or until the caller is cancelled."""
        while not self.reason:
            await anyio.sleep(RENEW_S)
            sent_s = time.monotonic()
            try:
                await self.records.run(self._renew)
                self._renewed_s = sent_s
            except LeaseLost:
                break
            except LiloError as error:
                _log.warning("the lease was not renewed: %s", error)
        self.lost.set()

    def give_back(self) -> None:
        """Let the next engine take it at once; one that was lost is left alone."""
        try:
            self.records.now(lambda session: _change(session, self.epoch, held=False))
        except LiloError as error:
            # The next engine finds that this process is dead, or waits.
            _log.warning("the lease was not given back: %s", error)
        self.records.guard = None

    def _renew(self, session: Session) -> None:
        # `guard` has looked already, in this transaction.
        _change(session, self.epoch, beat=LeaseRow.beat + 1)

    def _loss(self) -> LeaseLost:
        return LeaseLost(
            f"{self.holder} (epoch {self.epoch}) is no longer the engine of these records: {self.reason}"
        )


def _change(session: Session, epoch: int, **values: object) -> None:
    mine = (LeaseRow.name == NAME) & (LeaseRow.epoch == epoch)
    session.execute(sa.update(LeaseRow).where(mine).values(**values))


def _replace(session: Session, seen: Holder | None, new: Holder) -> bool:
    """Put `new` in place of what was seen; False when that is not there any more."""
    values = {
        "epoch": new.epoch,
        "beat": new.beat,
        "held": new.held,
        "holder": new.holder,
        "process": new.process,
        "address": new.address,
    }
    if seen is None:
        if session.get(LeaseRow, NAME) is not None:
            return False
        session.add(LeaseRow(name=NAME, **values))
        return True
    same = (LeaseRow.name == NAME) & (LeaseRow.epoch == seen.epoch) & (LeaseRow.beat == seen.beat)
    done = session.execute(sa.update(LeaseRow).where(same).values(**values))
    return cast("sa.CursorResult[Any]", done).rowcount == 1
