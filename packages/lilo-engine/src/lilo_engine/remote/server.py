"""EngineServer: answers fronts for the engine, the sampling manager and the console's view in this process.

A bare Starlette app with one route. It decides nothing about what is asked: it sees that the caller has the secret and
meant this engine, and that this process still is the engine (`control/lease.py`), before the call and again before its
answer leaves: a process may have been stopped in between.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lilo_engine.commands import frames
from lilo_engine.console.engine_view import EngineView
from lilo_engine.engine_client import EngineClient
from lilo_engine.errors import LiloError, NotFound, ServerError
from lilo_engine.operations.operation import RequestId
from lilo_engine.operations.result import Pending
from lilo_engine.remote.calls import (
    ENGINE_METHODS,
    EPOCH_HEADER,
    HEALTH_PATH,
    MEDIA_TYPE,
    PREFIX,
    SAMPLING_METHODS,
    VIEW_METHODS,
    WRONG_ENGINE,
    WRONG_SECRET,
    Hello,
)
from lilo_engine.requests.long_polls import LongPolls
from lilo_engine.sampling.completions import Whose
from lilo_engine.sampling.engine import SampleRequest
from lilo_engine.sampling.replies import Completions, SampleTicket
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim
from lilo_engine.sampling_client import SamplingClient

_log = logging.getLogger(__name__)

_Method: TypeAlias = Callable[..., Awaitable[object]]


class Reign(Protocol):
    """Whether this process is the engine of the records."""

    @property
    def epoch(self) -> int:
        """Of this engine."""
        ...

    def check(self) -> None:
        """See that it may answer.

        Raises:
            LiloError: it may not.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Who answers the calls of fronts."""

    hello: Hello
    engine: EngineClient
    sampling: SamplingClient
    view: EngineView
    reign: Reign
    secret: str
    polls: LongPolls = field(default_factory=LongPolls)
    """Those of fronts, which wait as long as clients do."""


def engine_server(
    answering: Answering, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]
) -> Starlette:
    """The app that fronts talk to; `lifespan` runs its parts."""
    methods = _methods(answering)

    async def answer(request: Request) -> Response:
        refusal = _refusal(request, answering)
        if refusal is not None:
            return refusal
        name = request.path_params["method"]
        try:
            body = await request.body()
            value = await _value(methods | _polls(answering, request), name, body)
        except ClientDisconnect:
            return Response(status_code=499)
        try:
            answering.reign.check()
        except LiloError as error:
            return PlainTextResponse(error.message, WRONG_ENGINE)
        return Response(frames.encode(value), media_type=MEDIA_TYPE)

    async def health(_: Request) -> Response:
        """For a supervisor, without the secret: 200 when a model could be created and sampled from now."""
        trainer, sampler = await answering.engine.state(), await answering.sampling.state()
        words = f"trainer {trainer.phase}, sampler {sampler.phase}, epoch {answering.reign.epoch}"
        serving = trainer.phase == sampler.phase == "serving"
        return PlainTextResponse(words, 200 if serving else 503)

    routes = [
        Route(f"{PREFIX}/{{method}}", answer, methods=["POST"]),
        Route(HEALTH_PATH, health, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _refusal(request: Request, answering: Answering) -> Response | None:
    given = request.headers.get("authorization", "").encode("utf-8", "replace")
    if not hmac.compare_digest(given, f"Bearer {answering.secret}".encode()):
        return PlainTextResponse("the secret in the records is another one", WRONG_SECRET)
    try:
        answering.reign.check()
    except LiloError as error:
        return PlainTextResponse(error.message, WRONG_ENGINE)
    meant, here = request.headers.get(EPOCH_HEADER, ""), answering.reign.epoch
    if meant != str(here):
        return PlainTextResponse(
            f"this engine has epoch {here}, {meant or 'none'} was meant", WRONG_ENGINE
        )
    return None


async def _value(methods: Mapping[str, _Method], name: str, body: bytes) -> object:
    """What a call comes to: a value or an error, which both travel."""
    try:
        method = methods.get(name)
        if method is None:
            return NotFound(f"the engine has no method {name!r}; both sides must run one version")
        arguments = cast("tuple[Any, ...]", frames.decode(body))
        return await method(*arguments)
    except LiloError as error:
        return error
    except ClientDisconnect:
        raise
    except Exception as error:
        number = secrets.token_hex(4)
        _log.exception("call %s failed, error %s", name, number)
        return ServerError(
            f"internal error {number} ({type(error).__name__}); the engine's log has its cause"
        )


def _methods(answering: Answering) -> dict[str, _Method]:
    """By name; positional arguments only, as `client.py` sends them."""
    engine, sampling = answering.engine, answering.sampling

    async def say_hello() -> Hello:
        return answering.hello

    async def submit_sample(
        session_id: str,
        seq_id: int,
        fingerprint: str,
        adapter: AdapterVersion | None,
        request: SampleRequest,
        claim: Claim,
    ) -> SampleTicket:
        return await sampling.submit(
            session_id=session_id,
            seq_id=seq_id,
            fingerprint=fingerprint,
            adapter=adapter,
            request=request,
            claim=claim,
        )

    async def retrieved(whose: tuple[str, int], request_ids: tuple[str, ...]) -> None:
        await sampling.retrieved(Whose(*whose), request_ids)

    methods: dict[str, _Method] = {
        name: getattr(engine, name) for name in ENGINE_METHODS if name != "hello"
    }
    methods |= {f"sampling.{name}": getattr(sampling, name) for name in SAMPLING_METHODS}
    methods |= {f"view.{name}": getattr(answering.view, name) for name in VIEW_METHODS}
    return methods | {
        "hello": say_hello,
        "sampling.submit": submit_sample,
        "sampling.retrieved": retrieved,
    }


def _polls(answering: Answering, request: Request) -> dict[str, _Method]:
    """The methods that wait as long as the client that asks is there."""
    engine, sampling, polls = answering.engine, answering.sampling, answering.polls

    async def retrieve(request_id: str, wait_s: float, announce_above: int | None) -> object:
        look = partial(engine.retrieve, RequestId(request_id), announce_above=announce_above)
        return await polls.answer(request, look, wait_s, pending=_is_pending)

    async def retrieve_sample(request_id: str, wait_s: float, announce_above: int | None) -> object:
        look = partial(sampling.retrieve, request_id, announce_above=announce_above)
        return await polls.answer(request, look, wait_s, pending=_is_pending)

    async def completions(whose: tuple[str, int], cursor: int, wait_s: float) -> Completions:
        look = partial(sampling.completions, Whose(*whose), cursor)
        return await polls.answer(request, look, wait_s, pending=lambda seen: not seen.ended)

    return {
        "retrieve": retrieve,
        "sampling.retrieve": retrieve_sample,
        "sampling.completions": completions,
    }


def _is_pending(state: object) -> bool:
    return isinstance(state, Pending)
