"""create_model, create from a checkpoint, get_info and unload_model."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.ids import model_id_of
from lilo_engine.operations.lora_metadata import lora_from_metadata
from lilo_engine.operations.operation import CreateModel, ModelId
from lilo_engine.requests import decode
from lilo_engine.requests.body import read_json
from lilo_engine.requests.front import front_of, view_of
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.wire_json import CreateModelBody, LoadWeightsBody, ModelBody

router = APIRouter()


@router.post("/create_model")
async def create_model(request: Request) -> Response:
    """Make a model resident: its id is what the SDK builds by itself."""
    front = front_of(request)
    wire = await read_json(request, CreateModelBody, front.settings.body)
    view = view_of(request)
    await view.touch_session(wire.session_id)
    decode.check_optimizer(wire.optimizer_config.type)
    return await _create(
        request,
        CreateModel(
            model_id=model_id_of(wire.session_id, wire.model_seq_id),
            session_id=wire.session_id,
            owner=view.caller.owner,
            max_waiting_bytes=view.caller.limits.max_waiting_bytes,
            base_model=wire.base_model,
            lora=decode.lora_spec(wire.lora_config, front.definition.lora.alpha),
            user_metadata=decode.user_metadata(wire.user_metadata),
        ),
    )


async def create_from_checkpoint(request: Request, wire: LoadWeightsBody) -> Response:
    """Make a model resident with the adapter, and its shape, of a published checkpoint."""
    if wire.session_id is None or wire.model_seq_id is None:
        raise InvalidRequest("a new model needs both session_id and model_seq_id")
    view = view_of(request)
    await view.touch_session(wire.session_id)
    if wire.optimizer_config is not None:
        decode.check_optimizer(wire.optimizer_config.type)
    source = decode.training_ref(wire.path)
    spec = (await view.checkpoint(source)).spec
    return await _create(
        request,
        CreateModel(
            model_id=model_id_of(wire.session_id, wire.model_seq_id),
            session_id=wire.session_id,
            owner=view.caller.owner,
            max_waiting_bytes=view.caller.limits.max_waiting_bytes,
            base_model=wire.base_model or spec.get("base_model", ""),
            lora=lora_from_metadata(spec),
            source=source,
            with_optimizer=wire.optimizer,
            user_metadata=decode.user_metadata(wire.user_metadata),
        ),
    )


@router.post("/get_info")
async def get_info(request: Request) -> Response:
    """What a model is; asked right after its creation."""
    front = front_of(request)
    wire = await read_json(request, ModelBody, front.settings.body)
    view = view_of(request)
    run = await view.run(wire.model_id)
    await front.touch_model(view, wire.model_id)
    return json_response(
        {
            "type": "get_info",
            "model_id": run.run_id,
            "model_name": run.base_model,
            "is_lora": True,
            "lora_rank": run.lora_rank,
            "model_data": {
                "arch": front.definition.model.family,
                "model_name": run.base_model,
                "tokenizer_id": str(front.model_folder),
            },
        }
    )


@router.post("/unload_model")
async def unload_model(request: Request) -> Response:
    """End a model; older clients do so, newer ones end their session."""
    front = front_of(request)
    wire = await read_json(request, ModelBody, front.settings.body)
    await view_of(request).run(wire.model_id)
    await front.engine.unload(ModelId(wire.model_id), "its client unloaded it")
    return json_response({"type": "unload_model", "model_id": wire.model_id})


async def _create(request: Request, wanted: CreateModel) -> Response:
    request_id = await front_of(request).create_model(wanted)
    return json_response({"request_id": request_id, "model_id": wanted.model_id})
