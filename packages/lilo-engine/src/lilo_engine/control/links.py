"""Links: addresses that may be fetched for a while without a key, because they carry a signature.

What a link gives away is one file of one publication, or one report; the signature covers the path, which names it, and
the end. The secret lies in the records, so that every server over them knows the links of the others.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import quote

from sqlalchemy.orm import Session

from lilo_engine.control.records import Records
from lilo_engine.control.tables import SecretRow
from lilo_engine.errors import Unauthorized

LINK_PREFIX = "/api/v1/downloads/"
"""Below it a signature stands for the key."""
LIFETIME_S = 3600
_NAME = "links"


class Links:
    """Signs and checks links."""

    def __init__(self, records: Records) -> None:
        """Take the secret from the records; made when there is none."""
        self._secret = records.now(_secret)

    def sign(self, path: str, expires_s: int) -> str:
        """The path, which must start with `LINK_PREFIX`, as a link that works until `expires_s` (Unix seconds)."""
        assert path.startswith(LINK_PREFIX), path
        return f"{quote(path)}?expires={expires_s}&signature={self._signature(path, expires_s)}"

    def check(self, path: str, expires_s: int, signature: str, now_s: float) -> None:
        """Check what came with a path.

        Raises:
            Unauthorized: the signature is not of this path and end, or the end is over.
        """
        expected = self._signature(path, expires_s).encode()
        if not hmac.compare_digest(expected, signature.encode("utf-8", "replace")):
            raise Unauthorized("the signature of this link is not right; ask for a new one")
        if now_s >= expires_s:
            raise Unauthorized("this link is over; ask for a new one")

    def _signature(self, path: str, expires_s: int) -> str:
        text = f"{expires_s}\n{path}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def _secret(session: Session) -> bytes:
    row = session.get(SecretRow, _NAME)
    if row is None:
        row = SecretRow(name=_NAME, value=secrets.token_hex(32))
        session.add(row)
        session.flush()
    return bytes.fromhex(row.value)
