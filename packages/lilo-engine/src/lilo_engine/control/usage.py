"""Usage: what each owner used, by day, in the records; for `lilo keys list` and whoever sends bills.

`UsageMeter` (`console/usage_meter.py`) says what was used since it last looked; numbers are added, so that several
servers over one database may write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import anyio
import sqlalchemy as sa
from sqlalchemy.orm import Session

from lilo_engine.console.usage_meter import UsageMeter, Used
from lilo_engine.control.records import Records
from lilo_engine.control.tables import UsageRow
from lilo_engine.errors import LiloError

_log = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Between looks: what a server that is killed may have used without having written it down."""


class UsageLog:
    """The usage of all owners."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def add(self, used: Mapping[str, Used], now_s: float) -> None:
        """Count it to the day of `now_s`, in UTC."""
        if used:
            day = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d")
            await self._records.run(lambda session: _add(session, used, day))

    def by_owner(self, since: str = "") -> dict[str, Used]:
        """Of each owner, from a day on (`2026-11-30`), that day included."""
        return self._records.now(lambda session: _by_owner(session, since))


async def keep_usage(meter: UsageMeter, log: UsageLog, clock: Callable[[], float]) -> None:
    """Write down what was used, until cancelled; then once more.

    What could not be written is not lost: it is in the next report.
    """

    async def report() -> None:
        used: Mapping[str, Used] = {}
        try:
            used = await meter.take()
            await log.add(used, clock())
        except LiloError as error:
            meter.put_back(used)
            _log.warning("usage could not be written down: %s", error)

    try:
        while True:
            await anyio.sleep(INTERVAL_S)
            await report()
    finally:
        with anyio.move_on_after(1.0, shield=True):
            await report()


def _add(session: Session, used: Mapping[str, Used], day: str) -> None:
    for owner, more in used.items():
        row = session.get(UsageRow, (owner, day))
        if row is None:
            row = UsageRow(
                owner=owner,
                day=day,
                trained_tokens=0,
                prompt_tokens=0,
                sampled_tokens=0,
                device_s=0,
            )
            session.add(row)
            session.flush()
        # Added by the database, so that two servers' numbers do not overwrite each other.
        row.trained_tokens = UsageRow.trained_tokens + more.trained_tokens
        row.prompt_tokens = UsageRow.prompt_tokens + more.prompt_tokens
        row.sampled_tokens = UsageRow.sampled_tokens + more.sampled_tokens
        row.device_s = UsageRow.device_s + more.device_s


def _by_owner(session: Session, since: str) -> dict[str, Used]:
    sums = [
        sa.func.sum(column)
        for column in (
            UsageRow.trained_tokens,
            UsageRow.prompt_tokens,
            UsageRow.sampled_tokens,
            UsageRow.device_s,
        )
    ]
    query = sa.select(UsageRow.owner, *sums).where(UsageRow.day >= since).group_by(UsageRow.owner)
    return {
        row[0]: Used(
            trained_tokens=int(row[1]),
            prompt_tokens=int(row[2]),
            sampled_tokens=int(row[3]),
            device_s=float(row[4]),
        )
        for row in session.execute(query)
    }
