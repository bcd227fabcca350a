"""The API against its description: what schemathesis makes of it is answered as described, and never with a 5xx."""

from __future__ import annotations

import random

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from lilo_engine.app import ROUTES
from lilo_engine.requests.calls import CALLS, UNDESCRIBED
from lilo_engine.requests.openapi import document
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conformance.conftest import KEY
from tests.conformance.mutations import good_pass, mutated

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
PROTOBUF = "application/x-protobuf"


@schemathesis.serializer(PROTOBUF)
def binary(ctx, value):
    """Bodies of protobuf: schemathesis knows bytes alone; ours are passes, more or less."""
    rng = random.Random(repr(value))
    return mutated(good_pass("nobody:train:0", 1, rng), rng)


def test_every_route_is_described_and_nothing_else():
    routes = {
        (method.lower(), route.path)
        for part in ROUTES
        for route in part.router.routes
        for method in route.methods - {"HEAD"}
        if route.path not in UNDESCRIBED
    }
    assert {(call.method, call.path) for call in CALLS} == routes


def test_the_description_is_served_without_a_key(served):
    answer = httpx.get(f"{served.url}/api/v1/openapi.json")
    assert answer.status_code == 200
    assert answer.json() == document()
    assert answer.json()["openapi"].startswith("3.1")


SCHEMA = schemathesis.openapi.from_dict(document())


@SCHEMA.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_can_be_sent_is_answered_as_described(case, fussy):
    case.call_and_validate(
        base_url=fussy.url, headers={"X-API-Key": KEY}, checks=CHECKS, timeout=20
    )


ANSWERED = {
    "get_info": {"model_id": "MODEL"},
    "weights_info": {"tinker_path": "PATH"},
    "retrieve_future": {"request_id": "MODEL:0"},
    "create_sampling_session": {
        "session_id": "SESSION",
        "sampling_session_seq_id": 3,
        "base_model": "tiny",
    },
    "session_heartbeat": {"session_id": "SESSION"},
    "sessions/search": {},
    "client/config": {},
    "client/dynamic_config": {},
    "unload_model": {"model_id": "MODEL"},
}
LOOKED_AT = [
    "sessions",
    "sessions/SESSION",
    "sessions/SESSION/trace_export",
    "training_runs",
    "training_runs/MODEL",
    "training_runs/MODEL/checkpoints",
    "training_runs/MODEL/checkpoints/weights/x",
    "checkpoints",
    "samplers/SESSION:sample:3",
    "console/state",
    "console/trace",
    "console/runs/MODEL",
    "healthz",
]


def test_what_is_there_is_answered_as_described_too(served):
    """Random ids find nothing; these are of things that exist."""
    session_id = served.session()
    model_id = served.model(session_id)
    saved = served.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"})
    names = {
        "MODEL": model_id,
        "SESSION": session_id,
        "PATH": served.finished(saved).json()["path"],
    }

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    asked = [("post", path, body) for path, body in ANSWERED.items() if path != "unload_model"]
    asked += [("get", path, None) for path in LOOKED_AT]
    asked.append(("post", "unload_model", ANSWERED["unload_model"]))
    for method, path, body in asked:
        body = body and {k: filled(v) if isinstance(v, str) else v for k, v in body.items()}
        answer = served.http.request(method, f"/api/v1/{filled(path)}", json=body)
        assert answer.status_code == 200, (path, answer.text)
        found = SCHEMA.find_operation_by_path(method, f"/api/v1/{filled(path)}")
        found.validate_response(answer)


@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
def test_a_page_that_is_no_number_is_refused_as_described(served, path):
    answer = served.http.get(f"/api/v1/{path}?limit=many")
    assert answer.status_code == 422
    assert "limit" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
@pytest.mark.parametrize("number", [-1, 10**30, -(10**30)])
def test_a_page_beyond_all_counting_is_an_empty_page(served, path, number):
    answer = served.http.get(f"/api/v1/{path}?limit=5&offset={number}")
    assert answer.status_code == 200
    assert served.http.get(f"/api/v1/{path}?limit={number}").status_code == 200
