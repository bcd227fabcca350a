"""The one table from errors to HTTP."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import FastAPI, Request
from lilo_engine import errors
from lilo_engine.requests import error_response as error_response_module
from lilo_engine.requests.error_response import error_response, status_of

pytestmark = pytest.mark.anyio


def every_error() -> list[type[errors.LiloError]]:
    found, open_ = [], [errors.LiloError]
    while open_:
        found.append(kind := open_.pop())
        open_.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == errors.__name__]


def test_users_mistakes_are_4xx_and_ours_are_not_400():
    for kind in every_error():
        status = status_of(kind("words"))
        if issubclass(kind, errors.UserError):
            assert 400 <= status < 500, kind
        else:
            assert status in (408, 429, 500, 503), kind


def test_409_is_never_sent_because_the_sdk_repeats_it():
    assert 409 not in {status_of(kind("words")) for kind in every_error()}


def test_a_body_has_the_words_the_kind_and_its_length():
    response = error_response(errors.Gone("it ended"))
    assert json.loads(response.body) == {"detail": "it ended", "kind": "gone"}
    assert int(response.headers["content-length"]) == len(response.body)


def test_an_error_without_words_still_has_a_body():
    assert json.loads(error_response(errors.InvalidRequest("")).body)["detail"]


async def test_a_fault_of_ours_is_one_500_with_a_number_that_the_log_has_once(caplog):
    app = FastAPI()
    error_response_module.install(app)

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("the cause")

    async with httpx.AsyncClient(
        # The transport raises what the app raises: nothing may come through.
        transport=httpx.ASGITransport(app, raise_app_exceptions=True),
        base_url="http://test",
    ) as client:
        answer = await client.get("/broken")
        missing = await client.get("/not-there")
    assert answer.status_code == 500
    assert int(answer.headers["content-length"]) == len(answer.content)
    number = answer.json()["detail"].split()[2].rstrip(";")
    assert [number in record.getMessage() for record in caplog.records] == [True]
    assert missing.status_code == 404
    assert "/not-there" in missing.json()["detail"]


async def test_a_client_that_goes_away_in_mid_body_gets_no_answer_and_is_no_fault_of_ours(caplog):
    app = FastAPI()
    error_response_module.install(app)

    @app.post("/body")
    async def body(request: Request) -> None:
        async for _ in request.stream():
            pass

    messages = iter(
        [
            {"type": "http.request", "body": b"half", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    sent: list[object] = []

    async def receive() -> object:
        return next(messages)

    async def send(message: object) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/body",
        "raw_path": b"/body",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    assert sent == []
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
