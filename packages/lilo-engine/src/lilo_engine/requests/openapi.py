"""OpenAPI: a description of the public API, made from the calls and the models of their bodies; `/api/v1/openapi.json`.

The framework's own would know no bodies: routes here read them themselves, so that a refusal can use up its number.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from lilo_engine.requests.body import PROTOBUF
from lilo_engine.requests.calls import CALLS, Call, Model
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.wire_answers import Refusal

router = APIRouter()

_JSON = "application/json"
_REFUSED = {
    400: "A field, a value, a path or a number that cannot be accepted.",
    401: "No API key, or one that this server does not know.",
    404: "No such model, checkpoint, session or future, or none of this key's.",
    408: "The body did not come in time.",
    410: "It existed and ended; the words say how to go on.",
    413: "The body is larger than the server or the key allows.",
    415: "A content type or encoding that is not spoken here.",
    422: "A number in the address that is none.",
    429: "A limit of the server or of the key is reached for now.",
    503: "Starting, or about to stop.",
}
_PARAMETER = re.compile(r"\{(\w+)\}")


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The description."""
    return json_response(document())


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The description as plain values, of OpenAPI 3.1."""
    models = {model for call in CALLS for model in _models(call)} | {Refusal}
    named = _schemas(models)
    paths: dict[str, dict[str, Any]] = {}
    for call in CALLS:
        paths.setdefault(f"/api/v1{call.path}", {})[call.method] = _operation(call)
    key = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lilo, the public API", "version": version("lilo-engine")},
        "paths": paths,
        "components": {"schemas": named, "securitySchemes": {"key": key}},
        "security": [{"key": []}],
    }


def _operation(call: Call) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": call.words,
        "operationId": re.sub(r"\W+", "_", f"{call.method}{call.path}").strip("_"),
        "responses": _responses(call),
    }
    parameters = [_in_path(name) for name in _PARAMETER.findall(call.path)]
    parameters += [_in_query(name) for name in call.query]
    if parameters:
        operation["parameters"] = parameters
    if call.takes is not None:
        content: dict[str, Any] = {_JSON: {"schema": _ref(call.takes)}}
        if call.takes_binary:
            content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    if call.open:
        operation["security"] = []
    return operation


def _responses(call: Call) -> dict[str, Any]:
    given: dict[str, Any] = {_JSON: {"schema": _any_of(call.gives)}}
    if call.gives_binary:
        given[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": given}}
    also = {408: call.not_ready, 503: call.unready}
    for status, words in _REFUSED.items():
        other = also.get(status)
        models = (Refusal,) if other is None else (Refusal, other)
        content = {_JSON: {"schema": _any_of(models)}}
        responses[str(status)] = {"description": words, "content": content}
    return responses


def _in_path(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _in_query(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "integer"}}


def _models(call: Call) -> list[Model]:
    found = [call.takes, *call.gives, call.not_ready, call.unready]
    return [model for model in found if model is not None and model is not BaseModel]


def _any_of(models: tuple[Model, ...]) -> dict[str, Any]:
    if not models:
        return {"type": "object"}
    refs = [_ref(model) for model in models]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _ref(model: Model) -> dict[str, Any]:
    if model is BaseModel:
        return {"type": "object"}
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _schemas(models: set[Model]) -> dict[str, Any]:
    inputs = sorted(models, key=lambda model: model.__name__)
    _, schema = models_json_schema(
        [(model, "validation") for model in inputs], ref_template="#/components/schemas/{model}"
    )
    return schema["$defs"]
