"""JSON bodies of replies. Non-finite numbers are written as Python's parser reads them (NaN, Infinity)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    """A reply with a Content-Length; non-finite metrics pass, which Starlette's own class refuses."""
    data = json.dumps(body, separators=(",", ":")).encode("ascii")
    return Response(data, status_code=status, media_type="application/json")
