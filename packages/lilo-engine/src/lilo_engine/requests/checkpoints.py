"""save_weights, save_weights_for_sampler, load_weights and weights_info."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from lilo_engine.operations.lora_metadata import lora_from_metadata
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.requests import decode
from lilo_engine.requests.body import off_loop, parse_json, read_json
from lilo_engine.requests.front import (
    front_of,
    read_numbered,
    submit_body,
    submit_numbered,
    view_of,
)
from lilo_engine.requests.json_response import json_response
from lilo_engine.requests.models import create_from_checkpoint
from lilo_engine.requests.wire_json import LoadWeightsBody, WeightsInfoBody

router = APIRouter()


@router.post("/save_weights")
async def save_weights(request: Request) -> Response:
    """Publish adapter and optimizer."""
    return await submit_numbered(request, "save_weights", decode.save_state)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> Response:
    """Publish the adapter for sampling, under a name or for a sampling session."""
    return await submit_numbered(request, "save_weights_for_sampler", decode.save_sampler)


@router.post("/save_weights_external")
async def save_weights_external(request: Request) -> Response:
    """Publish the adapter for download; `external_weights_urls` then has a link for each file."""
    return await submit_numbered(request, "save_weights_external", decode.save_external)


@router.post("/load_weights")
async def load_weights(request: Request) -> Response:
    """Load into a resident model, which has a number, or into a new one, which has none."""
    body = await read_numbered(request, "load_weights")
    if await off_loop(len(body.data), lambda: decode.identity_of(body)) is None:
        wire = await off_loop(len(body.data), lambda: parse_json(body.data, LoadWeightsBody))
        if wire.session_id is not None or wire.model_seq_id is not None:
            return await create_from_checkpoint(request, wire)
    return await submit_body(request, body, "load_weights", decode.load_state)


@router.post("/weights_info")
async def weights_info(request: Request) -> Response:
    """What is needed to make a model for a checkpoint, from its manifest."""
    front = front_of(request)
    wire = await read_json(request, WeightsInfoBody, front.settings.body)
    spec = (await view_of(request).checkpoint(CheckpointRef.parse(wire.tinker_path))).spec
    lora = lora_from_metadata(spec)
    return json_response(
        {
            "base_model": spec.get("base_model", ""),
            "is_lora": True,
            "lora_rank": lora.lora_rank,
            "optimizer_config": {"type": "adamw"},
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }
    )
