"""Calls: every call of the public API with what it takes and gives, as values. `openapi.py` makes a description of it.

The routes themselves are in the other files of this folder; a test compares the two lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from lilo_engine.requests import wire_answers as answers
from lilo_engine.requests import wire_json as wire
from lilo_engine.requests import wire_sampling, wire_training
from lilo_engine.requests.wire_found import FoundSessions

Model = type[BaseModel]
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One method of one path."""

    method: str
    path: str
    """Below `/api/v1`."""
    words: str
    takes: Model | None = None
    """JSON body."""
    takes_binary: bool = False
    """Protobuf is taken too: `tinker_public.ForwardBackwardRequest`."""
    gives: tuple[Model, ...] = ()
    """JSON bodies of 200; none = some JSON object."""
    gives_binary: bool = False
    """Protobuf is given too, to whoever accepts it."""
    not_ready: Model | None = None
    """JSON body of 408 beside a refusal."""
    unready: Model | None = None
    """JSON body of 503 beside a refusal."""
    query: tuple[str, ...] = ()
    """Whole numbers."""
    open: bool = False
    """Needs no key."""


def _post(path: str, words: str, takes: Model | None, *gives: Model) -> Call:
    return Call(method="post", path=path, words=words, takes=takes, gives=gives)


def _get(path: str, words: str, *gives: Model, query: tuple[str, ...] = ()) -> Call:
    return Call(method="get", path=path, words=words, gives=gives, query=query)


_PAGE = ("limit", "offset")

CALLS: tuple[Call, ...] = (
    Call(
        method="get",
        path="/healthz",
        words="Whether a model could be created and sampled from now.",
        gives=(answers.Health,),
        unready=answers.Health,
        open=True,
    ),
    Call(method="get", path="/openapi.json", words="This description.", open=True),
    _post("/client/config", "Flags for clients.", None, answers.ClientConfig),
    _post("/client/dynamic_config", "Flags that may change.", None, answers.DynamicConfig),
    _get("/get_server_capabilities", "The base model.", answers.Capabilities),
    _post("/telemetry", "Accepted and dropped.", None, answers.Done),
    # Sessions.
    _post("/create_session", "Start a session.", wire.CreateSessionBody, answers.SessionCreated),
    _post("/session_heartbeat", "The client lives.", wire.SessionBody, answers.Beat),
    _post(
        "/sessions/{session_id}/finish",
        "End a session and its models.",
        wire.FinishSessionBody,
        answers.Done,
    ),
    _get("/sessions", "Ids, newest first.", answers.SessionIds, query=_PAGE),
    _get("/sessions/{session_id}", "One session.", answers.SessionAnswer),
    _post(
        "/sessions/search",
        "Sessions by what was said of them.",
        wire.SearchSessionsBody,
        FoundSessions,
    ),
    Call(
        method="put",
        path="/sessions/{session_id}/project",
        words="Group sessions.",
        takes=wire.ProjectBody,
        gives=(answers.Done,),
    ),
    _get("/sessions/{session_id}/trace_export", "A link to its timeline.", answers.TraceUrl),
    # Models.
    _post("/create_model", "Make a model resident.", wire.CreateModelBody, answers.Accepted),
    _post("/get_info", "What a model is.", wire.ModelBody, answers.ModelInfo),
    _post("/unload_model", "End a model.", wire.ModelBody, answers.Unloaded),
    Call(
        method="post",
        path="/forward_backward",
        words="A pass; numbered.",
        takes=wire_training.ForwardBackwardBody,
        takes_binary=True,
        gives=(answers.Accepted,),
    ),
    _post(
        "/forward",
        "A forward-only pass; numbered.",
        wire_training.ForwardBackwardBody,
        answers.Accepted,
    ),
    _post(
        "/optim_step", "An optimizer step; numbered.", wire_training.OptimStepBody, answers.Accepted
    ),
    _post(
        "/save_weights",
        "Publish adapter and optimizer; numbered.",
        wire.SaveWeightsBody,
        answers.Accepted,
    ),
    _post(
        "/save_weights_for_sampler",
        "Publish the adapter for sampling; numbered.",
        wire.SaveForSamplerBody,
        answers.Accepted,
    ),
    _post(
        "/save_weights_external",
        "Publish the adapter for download; numbered.",
        wire.SaveExternalBody,
        answers.Accepted,
    ),
    _post(
        "/load_weights",
        "Load into a model, which is numbered, or make one from a checkpoint.",
        wire.LoadWeightsBody,
        answers.Accepted,
    ),
    # Sampling.
    _post(
        "/create_sampling_session",
        "A sampling client.",
        wire_sampling.CreateSamplingSessionBody,
        answers.SamplingSessionCreated,
    ),
    _get("/samplers/{sampler_id}", "What it samples from.", answers.Sampler),
    _post("/asample", "Submit one prompt.", wire_sampling.SampleBody, answers.SampleAccepted),
    _post(
        "/join_sampling_session",
        "A block of numbers for one more copy of a client.",
        wire_sampling.JoinSamplingSessionBody,
        answers.Joined,
    ),
    # Futures.
    Call(
        method="post",
        path="/retrieve_future",
        words="The result of a request; waits for it.",
        takes=wire_sampling.RetrieveFutureBody,
        gives=(answers.Failed, answers.Announced, BaseModel),
        gives_binary=True,
        not_ready=answers.TryAgain,
    ),
    _post(
        "/retrieve_futures",
        "Samples of a client that ended; waits for the first.",
        wire_sampling.RetrieveFuturesBody,
        answers.Completions,
    ),
    _post("/cancel_future", "Give up a sample.", wire_sampling.FutureBody, answers.Done),
    # Runs and checkpoints.
    _get("/training_runs", "Runs of this key.", answers.RunList, query=_PAGE),
    _get("/training_runs/{run_id}", "One run.", answers.RunAnswer),
    _get("/training_runs/{run_id}/checkpoints", "Its checkpoints.", answers.CheckpointList),
    _get("/checkpoints", "Checkpoints of this key.", answers.CheckpointList, query=_PAGE),
    _get(_CHECKPOINT, "One checkpoint.", answers.CheckpointAnswer),
    Call(method="delete", path=_CHECKPOINT, words="Remove it for good.", gives=(answers.Done,)),
    Call(
        method="put",
        path=f"{_CHECKPOINT}/ttl",
        words="Change when it ends.",
        takes=wire.TtlBody,
        gives=(answers.Lifetime,),
    ),
    _post(f"{_CHECKPOINT}/publish", "Let every key read it.", None, answers.Done),
    Call(
        method="delete",
        path=f"{_CHECKPOINT}/publish",
        words="Take that back.",
        gives=(answers.Done,),
    ),
    _get(f"{_CHECKPOINT}/external_weights_urls", "Links to its files.", answers.WeightsUrls),
    _post("/copy_weights", "Publish it again.", wire.CopyWeightsBody, answers.Copied),
    _post("/weights_info", "What it is for.", wire.WeightsInfoBody, answers.WeightsInfo),
    # Watching.
    _get("/console/state", "Queue, lanes, models."),
    _get("/console/trace", "Timeline of the lanes, as a Chrome trace."),
    _get("/console/runs/{run_id}", "Where a run's time went."),
)
UNDESCRIBED = (
    "/downloads/weights/{run_id}/{kind}/{name}/{attempt}/{file:path}",
    "/downloads/traces/{session_id}",
    "/{call:path}",
)
"""Routes that nobody calls by their own: links that other calls give, and what is not offered."""
