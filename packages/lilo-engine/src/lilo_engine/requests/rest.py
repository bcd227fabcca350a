"""Runs and checkpoints as resources: list, get, delete, change of lifetime."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.control.checkpoints import Entry
from lilo_engine.control.control import Control
from lilo_engine.control.tables import RunRow
from lilo_engine.operations.reference import CheckpointKind, CheckpointRef
from lilo_engine.requests.body import read_json
from lilo_engine.requests.front import front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.page import page_of
from lilo_engine.requests.wire_json import TtlBody

_log = logging.getLogger(__name__)
router = APIRouter()

COMMON_NAME = "everybody"
"""What stands for the owner of things that are every key's."""
_TYPES: dict[CheckpointKind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@router.get("/training_runs")
async def list_runs(request: Request, limit: int = 20, offset: int = 0) -> Response:
    """Runs, the one asked for most recently first."""
    control = front_of(request).control
    limit, offset = page_of(limit, offset)
    page = await view_of(request).runs(limit, offset)
    runs = [await _run(control, row) for row in page.rows]
    return json_response({"training_runs": runs, "cursor": _cursor(limit, offset, page.total)})


@router.get("/training_runs/{run_id}")
async def get_run(request: Request, run_id: str) -> Response:
    """One run, live or ended."""
    control = front_of(request).control
    return json_response(await _run(control, await view_of(request).run(run_id)))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(request: Request, run_id: str) -> Response:
    """Named checkpoints of a run, newest first; of a stranger's run the public ones."""
    entries = await view_of(request).checkpoints_of_run(run_id)
    return json_response({"checkpoints": [_checkpoint(entry) for entry in entries]})


@router.get("/checkpoints")
async def list_checkpoints(request: Request, limit: int = 100, offset: int = 0) -> Response:
    """Named checkpoints of all runs of the caller, newest first."""
    limit, offset = page_of(limit, offset)
    entries, total = await view_of(request).checkpoints(limit, offset)
    checkpoints = [_checkpoint(entry) for entry in entries]
    return json_response({"checkpoints": checkpoints, "cursor": _cursor(limit, offset, total)})


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def get_checkpoint(request: Request, run_id: str, kind: str, name: str) -> Response:
    """One checkpoint."""
    ref = CheckpointRef.of(run_id, kind, name)
    return json_response(_checkpoint(await view_of(request).checkpoint(ref)))


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def delete_checkpoint(request: Request, run_id: str, kind: str, name: str) -> Response:
    """Remove a checkpoint for good."""
    ref = CheckpointRef.of(run_id, kind, name)
    await view_of(request).own_checkpoint(ref)
    await front_of(request).control.delete_checkpoint(ref, missing_ok=False)
    _log.info("key %s deleted %s", view_of(request).caller.key_id, ref)
    return json_response({"status": "deleted"})


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
async def set_ttl(request: Request, run_id: str, kind: str, name: str) -> Response:
    """Change when a checkpoint ends, counted from now."""
    front = front_of(request)
    wire = await read_json(request, TtlBody, front.settings.body)
    ttl_s = wire.ttl_seconds
    expires_s = None if ttl_s is None else front.control.clock() + ttl_s
    ref = CheckpointRef.of(run_id, kind, name)
    await view_of(request).own_checkpoint(ref)
    await front.control.checkpoints.set_lifetime(ref, expires_s)
    return json_response({"expires_at": iso_time(expires_s)})


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


async def _run(control: Control, row: RunRow) -> dict[str, object]:
    entries = await control.checkpoints.of_run(row.run_id)
    newest = {entry.ref.kind: _checkpoint(entry) for entry in reversed(entries)}
    return {
        "training_run_id": row.run_id,
        "base_model": row.base_model,
        "model_owner": row.owner or COMMON_NAME,
        "is_lora": True,
        "lora_rank": row.lora_rank,
        "corrupted": False,
        "last_request_time": iso_time(row.last_request_s),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": row.user_metadata or None,
    }


def _checkpoint(entry: Entry) -> dict[str, object]:
    return {
        "checkpoint_id": f"{entry.ref.kind}/{entry.ref.name}",
        "checkpoint_type": _TYPES[entry.ref.kind],
        "time": iso_time(entry.created_s),
        "tinker_path": str(entry.ref),
        "size_bytes": entry.size_bytes,
        "public": entry.public,
        "user_metadata": dict(entry.user_metadata) or None,
        "expires_at": iso_time(entry.expires_s),
    }


def iso_time(unix_s: float | None) -> str | None:
    """Unix seconds as the SDK reads times; None stays None."""
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat()
