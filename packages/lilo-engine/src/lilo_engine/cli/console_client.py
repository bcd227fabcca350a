"""Asks a running server what it did: used by `lilo trace` and `lilo report`."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from lilo_engine.cli.problems import Problem
from lilo_engine.config import API_KEY_VARIABLE, api_key_from_environment

TIMEOUT_S = 30.0
"""For one answer; a trace of all spans is a few megabytes."""

BaseUrl = Annotated[str, typer.Option(help="Of a running server.")]
ApiKey = Annotated[
    str | None, typer.Option(help=f"Its key; also {API_KEY_VARIABLE}.", show_default=False)
]
DEFAULT_URL = "http://127.0.0.1:8010"


def ask(base_url: str, path: str, api_key: str | None) -> dict[str, Any]:
    """GET a JSON document below `/api/v1/`.

    Raises:
        Problem: there is no answer, or it is a refusal; in words.
    """
    url = f"{base_url.rstrip('/')}/api/v1/{path}"
    key = api_key or api_key_from_environment()
    try:
        answer = httpx.get(url, headers={"X-API-Key": key} if key else {}, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        raise Problem(f"no answer from {url}: {error}; is `lilo serve` running there?") from error
    if answer.is_error:
        raise Problem(f"{url} answered {answer.status_code}: {_detail(answer)}")
    return answer.json()


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
