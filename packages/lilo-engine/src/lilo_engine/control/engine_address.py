"""EngineAddress: where fronts find the engine, and the secret by which it knows them; both lie in the records.

A front reads both again whenever the line is broken (`remote/line.py`); nothing of it is on a command line.
"""

from __future__ import annotations

import secrets

from sqlalchemy.orm import Session

from lilo_engine.control.lease import Holder, read_lease
from lilo_engine.control.records import Records
from lilo_engine.control.tables import SecretRow
from lilo_engine.errors import Unavailable
from lilo_engine.remote.line import Address

_NAME = "fronts"


class EngineAddress:
    """Reads who the engine of some records is."""

    def __init__(self, records: Records, url: str | None = None) -> None:
        """Read from these records.

        Args:
            records: of the engine.
            url: where it is reached from here, if not where it says itself: through a proxy, say.
        """
        self._records = records
        self._url = url

    async def find(self) -> Address:
        """Where the engine is now.

        Raises:
            Unavailable: there is none, or the records cannot be read.
        """
        holder, secret = await self._records.run(_look)
        if holder is None or not holder.held or secret is None:
            last = "" if holder is None else f"; the last one was {holder}"
            raise Unavailable(f"no engine runs over these records{last}; start one: lilo engine")
        url = self._url or holder.address
        if url is None:
            raise Unavailable(f"the engine of these records, {holder}, takes no fronts")
        return Address(url=url.rstrip("/"), epoch=holder.epoch, secret=secret)


def fronts_secret(session: Session) -> str:
    """The secret that fronts show the engine; made when there is none."""
    row = session.get(SecretRow, _NAME)
    if row is None:
        row = SecretRow(name=_NAME, value=secrets.token_hex(32))
        session.add(row)
        session.flush()
    return row.value


def _look(session: Session) -> tuple[Holder | None, str | None]:
    row = session.get(SecretRow, _NAME)
    return read_lease(session), None if row is None else row.value
