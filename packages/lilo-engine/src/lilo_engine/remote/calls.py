"""Calls: what the two sides of the line between a front and an engine's process agree on. Values only.

    POST /engine/v1/{method}      Authorization: Bearer SECRET      X-Lilo-Epoch: of the lease, as the front read it

Body and answer are frames (`commands/frames.py`): the arguments as (positional, by name), then the value or an error.
Any answer but 200 is about the line, never about the call: 401 another secret, 421 not the engine that was meant.
"""

from __future__ import annotations

from dataclasses import dataclass

from lilo_engine.commands import frames
from lilo_engine.engine_client import EngineState
from lilo_engine.sampling.futures import Sampled
from lilo_engine.sampling.replies import Completions, SampleTicket, SamplingState
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.room import Claim

PREFIX = "/engine/v1"
HEALTH_PATH = "/healthz"
MEDIA_TYPE = "application/x-lilo-frame"
EPOCH_HEADER = "x-lilo-epoch"
WRONG_SECRET = 401
WRONG_ENGINE = 421

ENGINE_METHODS = (
    "hello",
    "submit",
    "retrieve",
    "create_model",
    "unload",
    "state",
    "drain",
)
"""Of `EngineClient`, and the first question of all."""
VIEW_METHODS = ("overview", "timeline", "report", "metrics")
"""Of `EngineView`; on the line with `view.` before them."""
SAMPLING_METHODS = (
    "submit",
    "retrieve",
    "cancel",
    "completions",
    "retrieved",
    "join",
    "forget",
    "info",
    "state",
)
"""Of `SamplingClient`; on the line with `sampling.` before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a front must know of an engine before it can take requests."""

    version: str
    """Of lilo-engine: both sides must run the same one, since frames have no versions of their own."""
    definition: str
    """As JSON."""
    model_folder: str
    """Of the base model, on the engine's machine; clients on that machine load its tokenizer from there."""


# Samples are registered by `sampling/messages.py`, which the manager needs too.
frames.register(
    AdapterVersion, Claim, Completions, EngineState, Hello, Sampled, SampleTicket, SamplingState
)
