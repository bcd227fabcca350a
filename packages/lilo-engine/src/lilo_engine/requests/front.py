"""Front: what every route needs, and the one way in which a numbered request reaches the engine.

A numbered request that is refused still uses up its number, or the client's later ones would wait for it for ever:
so a refusal goes to the engine as an operation, and to the client as a 400.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fastapi import Request
from lilo_definitions import Definition
from starlette.responses import Response

from lilo_engine.control.access import Caller
from lilo_engine.control.control import Control
from lilo_engine.control.view import View
from lilo_engine.engine_client import EngineClient
from lilo_engine.errors import (
    Gone,
    LiloError,
    NotFound,
    Saturated,
    TooLarge,
    Unavailable,
    UserError,
)
from lilo_engine.operations.ids import session_of
from lilo_engine.operations.operation import (
    CreateModel,
    LoadState,
    ModelId,
    Operation,
    Refused,
    RequestId,
)
from lilo_engine.operations.result import FutureState
from lilo_engine.requests import decode
from lilo_engine.requests.body import PATIENCE, PROTOBUF, Body, BodyLimits, off_loop, read_body
from lilo_engine.requests.dropped_body import DroppedBody
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.long_polls import LongPolls
from lilo_engine.sampling.futures import PREFIX as SAMPLE_PREFIX
from lilo_engine.sampling.replies import SampleState
from lilo_engine.sampling_client import SamplingClient

_log = logging.getLogger(__name__)

SILENT_S = 30.0
"""A trainer answers within a second unless its host is in trouble, whatever it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Limits of the HTTP side."""

    body: BodyLimits = field(default_factory=BodyLimits)
    long_poll_s: float = 25.0
    """How long `retrieve_future` waits; the SDK gives up after 45 s."""
    one_poll_per_sampler: bool = False
    """Whether clients ask for all samples of a sampling session at once (`retrieve_futures`) instead of one by one."""
    inline_result_bytes: int = 1024 * 1024
    """Larger results are announced first, if the client asks for that, so that it can reserve the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a model could be created and sampled from now."""

    ready: bool
    words: str
    """What the trainer and the sampler are doing."""
    progress: Mapping[str, Mapping[str, str | int | float | None]]
    """Of each side that told: what it has done so far, and how long ago it last got on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """One definition, served by one engine and one sampling manager."""

    definition: Definition
    model_folder: Path
    """Of the base model; clients on this machine load its tokenizer from there."""
    engine: EngineClient
    sampling: SamplingClient
    control: Control
    settings: FrontSettings = field(default_factory=FrontSettings)
    polls: LongPolls = field(default_factory=LongPolls)

    async def readiness(self) -> Readiness:
        """Ask both sides. A trainer that does not answer for a while is still serving, and is said to be silent."""
        try:
            trainer, sampler = await self.engine.state(), await self.sampling.state()
        except Unavailable as error:
            return Readiness(ready=False, words=error.message, progress={})
        parts = {"trainer": trainer, "sampler": sampler}
        words = [
            f"{name} {state.phase}" + (f" ({state.last_failure})" if state.last_failure else "")
            for name, state in parts.items()
        ]
        ready = all(state.phase == "serving" for state in parts.values())
        if trainer.silent_s > SILENT_S:
            words.append(f"the trainer has not answered for {trainer.silent_s:.0f} s")
        progress: dict[str, dict[str, str | int | float | None]] = {}
        if trainer.health is not None:
            progress["trainer"] = {
                "last_command": trainer.health.last_completed,
                "completed_commands": trainer.health.completed_commands,
                "age_s": round(trainer.health.age_s, 3),
                "silent_s": round(trainer.silent_s, 3),
            }
        if sampler.health is not None:
            progress["sampler"] = {
                "generated_tokens": sampler.health.generated_tokens,
                "age_s": round(sampler.health.age_s, 3),
            }
        return Readiness(ready=ready, words=", ".join(words), progress=progress)

    async def touch_model(self, view: View, model_id: str) -> None:
        """Note that the client of a model was heard of.

        Raises:
            NotFound: it is not the caller's, or never was.
            Gone: its session ended.
        """
        await view.check_model(model_id)
        now_s = self.control.clock()
        self.control.runs.touch(model_id, now_s)
        # A model id without a session is the engine's to refuse, with its number.
        with contextlib.suppress(NotFound):
            await self.control.sessions.touch(session_of(model_id), now_s)

    async def submit(
        self, view: View, operation: Operation, trace_parent: str | None = None
    ) -> RequestId:
        """Hand an operation of a caller to the engine.

        Raises:
            Gone: the model ended; the message says why and how to go on.
            NotFound, InvalidRequest, Saturated: see `EngineClient.submit`.
        """
        await self.touch_model(view, operation.model_id)
        try:
            return await self.engine.submit(operation, trace_parent)
        except NotFound as error:
            raise await self.control.runs.why_gone(operation.model_id) or error from error

    async def create_model(self, wanted: CreateModel) -> RequestId:
        """Hand a creation to the engine.

        Raises:
            Gone: a model of this id has ended, also one of an earlier engine.
            InvalidRequest, Unavailable: see `EngineClient.create_model`.
        """
        await self.control.runs.refuse_ended(wanted.model_id)
        return await self.engine.create_model(wanted)

    async def retrieve(
        self, request_id: str, wait_s: float, announce_above: int | None
    ) -> FutureState:
        """The state of an operation; see `EngineClient.retrieve`.

        Raises:
            Gone: its model ended, also with an earlier engine.
            NotFound: there is no such request.
        """
        try:
            return await self.engine.retrieve(RequestId(request_id), wait_s, announce_above)
        except NotFound:
            await self.control.runs.refuse_ended(request_id.rpartition(":")[0])
            raise

    async def retrieve_sample(
        self, request_id: str, wait_s: float, announce_above: int | None
    ) -> SampleState:
        """The state of a sample; see `SamplingClient.retrieve`.

        Raises:
            Gone: it went with an earlier engine; sent again, it is done anew.
            NotFound: there is no such request.
        """
        try:
            return await self.sampling.retrieve(request_id, wait_s, announce_above)
        except NotFound as error:
            session_id = request_id.removeprefix(SAMPLE_PREFIX).rpartition(":")[0]
            with contextlib.suppress(NotFound):
                await self.control.sampling_sessions.get(session_id)
                # The SDK takes a 410 as "send it again", which is right for an answer that was lost.
                raise Gone(f"{error.message}; the engine may have been started again") from error
            raise


def front_of(request: Request) -> Front:
    """The front of the app that got this request."""
    return cast(Front, request.app.state.front)


def view_of(request: Request) -> View:
    """What the caller of this request may see."""
    return View(front_of(request).control, cast(Caller, request.state.caller))


async def submit_numbered(
    request: Request, verb: str, decoded: Callable[[Body], Operation]
) -> Response:
    """Read a numbered request and submit it; see `submit_body`."""
    body = await read_numbered(request, verb)
    return await submit_body(request, body, verb, decoded)


async def read_numbered(request: Request, verb: str) -> Body:
    """Read a request that may have a number; one that is too large uses it up too."""
    limits = front_of(request).settings.body
    dropped = DroppedBody(
        request.headers.get("content-encoding", ""),
        protobuf=request.headers.get("content-type", "").startswith(PROTOBUF),
        limit_bytes=PATIENCE * limits.decompressed_bytes,
    )
    try:
        return await read_body(request, limits, dropped.feed)
    except TooLarge as error:
        await _use_up_number(request, dropped.identity, verb, error)
        raise


async def submit_body(
    request: Request, body: Body, verb: str, decoded: Callable[[Body], Operation]
) -> Response:
    """Decode a numbered request and submit it; refuse it together with its number if that cannot be done.

    Raises:
        LiloError: the refusal.
    """
    view = view_of(request)
    try:
        operation = await off_loop(len(body.data), lambda: decoded(body))
        if isinstance(operation, LoadState):
            await view.check_source(operation.source)
    except UserError as error:
        found = await off_loop(len(body.data), lambda: decode.identity_of(body))
        await _use_up_number(request, found, verb, error)
        raise
    trace_parent = request.headers.get("traceparent")
    request_id = await front_of(request).submit(view, operation, trace_parent)
    return json_response({"request_id": request_id, "model_id": operation.model_id})


async def _use_up_number(
    request: Request, identity: tuple[str, int] | None, verb: str, error: UserError
) -> None:
    """Have a refused request take the place of its number, where model and number could be read.

    Raises:
        Saturated, Unavailable: not now. The client is told that instead of the refusal, since it sends such a request
            again, with the same number; behind one that is left out all later ones would wait.
    """
    if identity is None or not identity[0].isascii():
        return
    model_id, seq_id = identity
    refused = Refused(
        model_id=ModelId(model_id),
        seq_id=seq_id,
        verb=verb,
        error=error,
        adds_gradients=verb == "forward_backward",
    )
    try:
        await front_of(request).submit(view_of(request), refused)
    except (Saturated, Unavailable):
        raise
    except LiloError as second:
        # The model or the number are wrong too; the client hears of the first fault.
        _log.info("the refused %s %d of %s has no number: %s", verb, seq_id, model_id, second)
