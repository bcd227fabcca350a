"""Checkpoints for others: public ones, copies, and links to the files of a PEFT folder.

A link works without a key, for an hour (`control/links.py`). It names one publication: a later save of the same name is
other content and has other links.
"""

from __future__ import annotations

import hashlib
import logging
import secrets

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from lilo_engine.control.links import LIFETIME_S, LINK_PREFIX
from lilo_engine.control.view import View
from lilo_engine.errors import InvalidRequest, NotFound
from lilo_engine.operations.ids import model_id_of
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.requests.body import read_json
from lilo_engine.requests.front import Front, front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.rest import iso_time
from lilo_engine.requests.wire_json import CopyWeightsBody

_log = logging.getLogger(__name__)
router = APIRouter()
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_WEIGHTS = "weights"


@router.post(f"{_CHECKPOINT}/publish")
async def publish(request: Request, run_id: str, kind: str, name: str) -> Response:
    """Let every key of this server use a checkpoint."""
    ref = CheckpointRef.of(run_id, kind, name)
    await _set_public(request, ref, True)
    return json_response({"status": "published"})


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish(request: Request, run_id: str, kind: str, name: str) -> Response:
    """Take that back."""
    ref = CheckpointRef.of(run_id, kind, name)
    await _set_public(request, ref, False)
    return json_response({"status": "unpublished"})


@router.get(f"{_CHECKPOINT}/external_weights_urls")
async def external_weights_urls(request: Request, run_id: str, kind: str, name: str) -> Response:
    """A link for each file of a PEFT folder."""
    control = front_of(request).control
    ref = CheckpointRef.of(run_id, kind, name)
    if ref.kind == "weights":
        raise InvalidRequest(
            f"{ref} is a training state, which only this server reads; save_weights_external makes a PEFT folder"
        )
    await view_of(request).checkpoint(ref)
    checkpoint = await control.checkpoints.files(ref)
    expires_s = int(control.clock()) + LIFETIME_S
    folder = f"{LINK_PREFIX}{_WEIGHTS}/{run_id}/{kind}/{name}/{checkpoint.publication.attempt}"
    urls = {
        entry.path: absolute(request, control.links.sign(f"{folder}/{entry.path}", expires_s))
        for entry in checkpoint.manifest.files
    }
    return json_response({"urls": urls, "expires": iso_time(expires_s)})


@router.get("/downloads/weights/{run_id}/{kind}/{name}/{attempt}/{file:path}")
async def download(
    request: Request,
    run_id: str,
    kind: str,
    name: str,
    attempt: str,
    file: str,
    expires: int = 0,
    signature: str = "",
) -> Response:
    """One file, to whoever has the link."""
    control = front_of(request).control
    control.links.check(request.url.path, expires, signature, control.clock())
    checkpoint = await control.checkpoints.files(CheckpointRef.of(run_id, kind, name))
    known = {entry.path for entry in checkpoint.manifest.files}
    if checkpoint.publication.attempt != attempt or file not in known:
        raise NotFound("what this link was made for was replaced; ask for a new one")
    return FileResponse(checkpoint.folder / file, media_type="application/octet-stream")


@router.post("/copy_weights")
async def copy_weights(request: Request) -> Response:
    """Publish a checkpoint again below another run; its source may go then."""
    front, view = front_of(request), view_of(request)
    wire = await read_json(request, CopyWeightsBody, front.settings.body)
    source = CheckpointRef.parse(wire.source_path)
    await view.checkpoint(source)
    now_s = front.control.clock()
    expires_s = None if wire.ttl_seconds is None else now_s + wire.ttl_seconds
    run_id = await _destination(front, view, wire, request.headers.get("x-idempotency-key", ""))
    copied = await front.control.checkpoints.copy(
        source, run_id, owner=view.caller.owner, expires_s=expires_s, now_s=now_s
    )
    _log.info("key %s copied %s to %s", view.caller.key_id, source, copied.ref)
    return json_response({"tinker_path": str(copied.ref)})


def absolute(request: Request, link: str) -> str:
    """A link with the address under which the client reached this server, a prefix before `/api/v1` included."""
    base = request.base_url
    # A proxy that ends TLS says so; whoever else says it gets a link of no use to himself.
    if request.headers.get("x-forwarded-proto") == "https":
        base = base.replace(scheme="https")
    return f"{str(base).rstrip('/')}{link}"


async def _set_public(request: Request, ref: CheckpointRef, public: bool) -> None:
    await view_of(request).own_checkpoint(ref)
    control = front_of(request).control
    await control.checkpoints.set_public(ref, public)
    done = "published" if public else "unpublished"
    _log.info("key %s %s %s", view_of(request).caller.key_id, done, ref)
    # Those who sample from it are looked at anew.
    control.sampling_sessions.forget(ref)


async def _destination(
    front: Front, view: View, wire: CopyWeightsBody, idempotency_key: str
) -> str:
    """The run that gets the copy: a slot of a session, or a run of its own that a repeated call finds again.

    Raises:
        InvalidRequest: neither is named, or the slot has a run that is no copy.
        NotFound: the caller has no such session.
    """
    if wire.session_id is not None and wire.model_seq_id is not None:
        await view.check_session(wire.session_id)
        run_id = model_id_of(wire.session_id, wire.model_seq_id)
        if await front.control.runs.is_live(run_id):
            raise InvalidRequest(
                f"model {run_id!r} lives in this slot; choose another model_seq_id"
            )
        return run_id
    if wire.destination_project_id is None:
        raise InvalidRequest(
            "copy_weights needs destination_project_id, or session_id and model_seq_id"
        )
    if idempotency_key:
        # With the caller in it, so that nobody finds the run of another.
        words = (view.caller.owner, wire.destination_project_id, idempotency_key)
        text = "\n".join(words).encode("utf-8", "surrogatepass")
        number = hashlib.sha256(text).hexdigest()[:16]
    else:
        number = secrets.token_hex(8)
    return model_id_of(f"copy-{number}", 0)
