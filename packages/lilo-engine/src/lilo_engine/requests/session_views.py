"""What can be asked about sessions: search, projects, and a timeline as a trace file.

The timeline is made of the records: when the session was there, its models, their checkpoints and its sampling clients.
What each lane of the trainer did in between is another trace, of the server as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.control.access import owners_of
from lilo_engine.control.control import Control
from lilo_engine.control.links import LIFETIME_S, LINK_PREFIX
from lilo_engine.control.session_search import Status, Summary, Wanted, status_of
from lilo_engine.requests.body import read_json
from lilo_engine.requests.front import front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.rest import COMMON_NAME, iso_time
from lilo_engine.requests.sharing import absolute
from lilo_engine.requests.wire_json import ProjectBody, SearchSessionsBody, StatusQueryBody

router = APIRouter()

_FINISHED: tuple[Status, ...] = ("success", "errored", "interrupted")


@router.post("/sessions/search")
async def search_sessions(request: Request) -> Response:
    """A page of the sessions that fit, newest first."""
    front = front_of(request)
    wire = await read_json(request, SearchSessionsBody, front.settings.body)
    after = None
    if wire.cursor is not None:
        after = (wire.cursor.last_created_at.timestamp(), wire.cursor.last_session_id)
    view = view_of(request)
    wanted = Wanted(
        owners=owners_of(view.caller),
        session_id=wire.session_id,
        display_name=wire.display_name,
        project_ids=wire.project_ids,
        user_metadata=wire.user_metadata,
        statuses=None if wire.statuses is None else frozenset(_statuses(wire.statuses)),
        after=after,
        limit=wire.limit,
    )
    found, more = await front.control.session_search.find(wanted)
    cursor = None
    if more:
        last = found[-1].row
        cursor = {
            "last_created_at": iso_time(last.created_s),
            "last_session_id": last.session_id,
        }
    return json_response({"sessions": [_summary(one) for one in found], "next_cursor": cursor})


@router.put("/sessions/{session_id}/project")
async def assign_project(request: Request, session_id: str) -> Response:
    """Group sessions by a word of the client's own; nothing is kept apart by it."""
    front = front_of(request)
    wire = await read_json(request, ProjectBody, front.settings.body)
    await view_of(request).check_session(session_id)
    await front.control.session_search.assign_project(session_id, wire.project_id)
    return json_response({"status": "assigned"})


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """A link to the session's timeline; it is made when it is fetched, so that it is never behind."""
    control = front_of(request).control
    await view_of(request).check_session(session_id)
    expires_s = int(control.clock()) + LIFETIME_S
    link = control.links.sign(f"{LINK_PREFIX}traces/{session_id}", expires_s)
    return json_response({"status": "ready", "url": absolute(request, link)})


@router.get("/downloads/traces/{session_id}")
async def trace(
    request: Request, session_id: str, expires: int = 0, signature: str = ""
) -> Response:
    """The timeline as Chrome trace events, which https://ui.perfetto.dev opens."""
    control = front_of(request).control
    control.links.check(request.url.path, expires, signature, control.clock())
    return json_response(
        {"displayTimeUnit": "ms", "traceEvents": await _events(control, session_id)}
    )


def _statuses(queries: Iterable[StatusQueryBody]) -> Iterator[Status]:
    """Nothing here cancels or fails a session as a whole, so that those two find nothing."""
    for query in queries:
        match query.type:
            case "active":
                yield "active"
            case "client_finished":
                yield from query.reasons or _FINISHED
            case "cancelled" | "failed":
                pass


def _summary(found: Summary) -> dict[str, object]:
    row = found.row
    return {
        "session_id": row.session_id,
        "created_at": iso_time(row.created_s),
        "owner": row.owner or COMMON_NAME,
        "project_id": row.project_id or "",
        "status": _status(found),
        "checkpoints_count": found.num_checkpoints,
        "checkpoint_storage_bytes": found.size_bytes,
        "display_name": row.display_name,
        "user_metadata": row.user_metadata,
    }


def _status(found: Summary) -> dict[str, object] | None:
    kind, detail = status_of(found.row)
    if kind == "active":
        return {"type": "active"}
    if kind == "unknown":
        return None
    return {"type": "client_finished", "reason": {"type": kind}, "detail": detail}


async def _events(control: Control, session_id: str) -> list[dict[str, object]]:
    session = await control.sessions.get(session_id)
    now_s = control.clock()
    events = [_span("session", session_id, 0, session.created_s, session.ended_s or now_s)]
    for lane, run_id in enumerate(await control.runs.of_session(session_id), start=1):
        run = await control.runs.get(run_id)
        end_s = run.ended_s or now_s
        events.append(_span(f"model of rank {run.lora_rank}", run_id, lane, run.created_s, end_s))
        for entry in await control.checkpoints.of_run(run_id):
            at = {"name": f"{entry.ref.kind}/{entry.ref.name}", "ph": "i", "s": "t"}
            events.append({**at, "pid": 1, "tid": lane, "ts": entry.created_s * 1e6})
    return events


def _span(name: str, about: str, lane: int, start_s: float, end_s: float) -> dict[str, object]:
    """A complete event; times in microseconds."""
    length = max(0.0, end_s - start_s) * 1e6
    times = {"ts": start_s * 1e6, "dur": length}
    return {"name": name, "ph": "X", "pid": 1, "tid": lane, **times, "args": {"id": about}}
