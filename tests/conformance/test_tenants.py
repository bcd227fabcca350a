"""A stranger with a key of the same server: every call that names a thing, tried with another's thing.

What is another's must look exactly as what is not there: the same error in the same words, but for the name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
import tinker
from tinker import types

from tests.conformance.conftest import KEY, STRANGERS_KEY
from tests.conformance.stranger import (
    FORGED,
    LIMIT_S,
    NOTHING,
    SDK,
    Call,
    Stranger,
    Things,
    sampler_id_in,
)
from tests.conformance.test_sdk import draw, loss_of, step
from tests.conformance.test_ten_facts import binary, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning"),
]


def connect(served, key: str, monkeypatch: pytest.MonkeyPatch) -> tinker.ServiceClient:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return tinker.ServiceClient(base_url=served.url, api_key=key, project_id="elsewhere")


@pytest.fixture(scope="module")
def owner(served) -> Iterator[tuple[tinker.ServiceClient, tinker.TrainingClient, Things]]:
    """A client that has trained, saved and sampled."""
    with pytest.MonkeyPatch.context() as patch:
        service = connect(served, KEY, patch)
        client = trainer(service)
        run_id = client.get_info().model_id
        step(client)
        state = client.save_state("mine").result(timeout=LIMIT_S).path
        weights = client.save_weights_for_sampler("mine").result(timeout=LIMIT_S).path
        external = client.save_weights_external("mine").result(timeout=LIMIT_S).path
        sampler = service.create_sampling_client(base_model="tiny").result(timeout=LIMIT_S)
        draw(sampler)
        sampler_id = sampler_id_in(sampler.get_sampler_handle())
        things = Things(
            session_id=run_id.split(":")[0],
            run_id=run_id,
            state=state,
            weights=weights,
            external=external,
            sampler_id=sampler_id,
            pass_id=f"{run_id}:1",
            sample_id=f"sample:{sampler_id}:0",
        )
        yield service, client, things
        service.close("success").result(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def stranger(served) -> Iterator[Stranger]:
    with (
        pytest.MonkeyPatch.context() as patch,
        httpx.Client(
            base_url=served.url, headers={"X-API-Key": STRANGERS_KEY}, timeout=LIMIT_S
        ) as http,
    ):
        service = connect(served, STRANGERS_KEY, patch)
        rest = tinker.RestClient(base_url=served.url, api_key=STRANGERS_KEY)
        yield Stranger(service, trainer(service), rest, http)
        service.close("success").result(timeout=LIMIT_S)


NAMES_A_THING = re.compile(r"path$|_id$|^handle$")
NAMES_NO_THING = {"project_id", "destination_project_id"}


def outcome(call: Call, stranger: Stranger, things: Things) -> tuple[type, str]:
    """How a call ended: the error and its words, without the names."""

    def done() -> None:
        found = call(stranger, things)
        if hasattr(found, "result"):
            found.result(timeout=LIMIT_S)

    with pytest.raises((tinker.TinkerError, tinker.RequestFailedError)) as caught:
        done()
    words = str(caught.value)
    for name in (things.run_id, things.session_id, things.sampler_id):
        words = words.replace(name, "NAME")
    return type(caught.value), re.sub(r"\d+:(train|sample)|:sample:\d+", "", words)


@pytest.mark.parametrize("method", [*SDK, *FORGED])
def test_to_every_method_of_the_sdk_what_is_anothers_is_as_if_it_were_not_there(
    stranger, owner, method
):
    call = SDK.get(method) or FORGED[method]
    kind, words = outcome(call, stranger, owner[2])
    assert kind is tinker.NotFoundError, words
    assert (kind, words) == outcome(call, stranger, NOTHING)


@pytest.mark.parametrize(
    "client",
    [tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient],
)
def test_every_method_that_names_a_thing_is_tried(client):
    takes: set[str] = set()
    for name in dir(client):
        method = getattr(client, name)
        if name.startswith("_") or name.endswith("_async") or not callable(method):
            continue
        parameters = set(inspect.signature(method).parameters) - NAMES_NO_THING
        if any(NAMES_A_THING.search(each) for each in parameters):
            takes.add(f"{client.__name__}.{name}")
    # `create` takes the SDK's own inner object; `create_sampling_client` is how it is called.
    takes -= {"SamplingClient.create", "RestClient.get_current_checkpoint_storage_usage"}
    takes -= {"RestClient.list_training_runs"}  # by a project, which is a word
    assert takes <= set(SDK)


def test_lists_and_searches_have_nothing_of_others(stranger, owner):
    things, rest = owner[2], stranger.rest
    runs = rest.list_training_runs(limit=1000).result(timeout=LIMIT_S)
    assert things.run_id not in {run.training_run_id for run in runs.training_runs}
    assert runs.cursor.total_count == len(runs.training_runs), "nor are they counted"
    found = rest.list_user_checkpoints(limit=1000).result(timeout=LIMIT_S)
    assert found.checkpoints == []
    sessions = rest.list_sessions(limit=1000).result(timeout=LIMIT_S).sessions
    assert things.session_id not in sessions
    search = types.SessionSearchRequest(session_id=things.session_id)
    assert rest.search_sessions(search).result(timeout=LIMIT_S).sessions == []


def test_another_finds_all_of_its_own(owner, served):
    things, rest = owner[2], tinker.RestClient(base_url=served.url, api_key=KEY)
    runs = rest.list_training_runs(limit=1000).result(timeout=LIMIT_S).training_runs
    mine = {run.training_run_id: run for run in runs}[things.run_id]
    assert re.fullmatch(r"[0-9a-f]{12}", mine.model_owner)
    paths = {
        c.tinker_path
        for c in rest.list_user_checkpoints(limit=1000).result(timeout=LIMIT_S).checkpoints
    }
    assert {things.state, things.weights, things.external} <= paths
    assert things.session_id in rest.list_sessions(limit=1000).result(timeout=LIMIT_S).sessions


RAW: dict[str, Callable[[Things], dict[str, object]]] = {
    "session_heartbeat": lambda t: {"session_id": t.session_id},
    "create_model": lambda t: {
        "session_id": t.session_id,
        "model_seq_id": 7,
        "base_model": "tiny",
    },
    "create_sampling_session": lambda t: {
        "session_id": t.session_id,
        "sampling_session_seq_id": 9,
        "base_model": "tiny",
    },
    "get_info": lambda t: {"model_id": t.run_id},
    "unload_model": lambda t: {"model_id": t.run_id},
    "optim_step": lambda t: {"model_id": t.run_id, "seq_id": 99, "adam_params": {}},
    "save_weights": lambda t: {"model_id": t.run_id, "seq_id": 99, "path": "theirs"},
    "load_weights": lambda t: {
        "session_id": t.session_id,
        "model_seq_id": 8,
        "path": t.state,
        "optimizer": True,
    },
    "weights_info": lambda t: {"tinker_path": t.state},
    "retrieve_future": lambda t: {"request_id": t.pass_id},
    "retrieve_futures": lambda t: {
        "target": {"type": "sampling_session", "sampling_session_id": t.sampler_id},
        "timeout": 0,
    },
    "join_sampling_session": lambda t: {"sampling_session_id": t.sampler_id},
    "asample": lambda t: {
        "sampling_session_id": t.sampler_id,
        "seq_id": 50,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    },
    "copy_weights": lambda t: {
        "source_path": t.state,
        "session_id": t.session_id,
        "model_seq_id": 5,
    },
}


@pytest.mark.parametrize("call", RAW)
def test_to_raw_calls_too(stranger, owner, call):
    answers = []
    for things in (owner[2], NOTHING):
        answer = stranger.http.post(f"/api/v1/{call}", json=RAW[call](things))
        words = answer.text.replace(things.session_id, "NAME")
        answers.append((answer.status_code, re.sub(r":sample:\d+", "", words)))
    assert answers[0][0] == 404, answers
    assert answers[0] == answers[1]


def test_older_clients_too(stranger, owner, served):
    """Those that sample without a session, and send passes as JSON."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    params = {"max_tokens": 1}
    path = {"model_path": owner[2].weights, "prompt": prompt, "sampling_params": params}
    assert stranger.http.post("/api/v1/asample", json=path).status_code == 404
    own = served.post(
        "asample", {"base_model": "tiny", "prompt": prompt, "sampling_params": params}
    )
    mine = {"request_id": own.json()["request_id"]}
    assert stranger.http.post("/api/v1/retrieve_future", json=mine).status_code == 404
    assert served.finished(own).status_code == 200
    body = {"forward_input": {"data": [], "loss_fn": "cross_entropy"}, "seq_id": 99}
    theirs = {**body, "model_id": owner[2].run_id}
    assert stranger.http.post("/api/v1/forward", json=theirs).status_code == 404


def test_a_stranger_can_neither_end_nor_cancel_nor_use_up_anything(stranger, owner, served):
    _, client, things = owner
    session = f"/api/v1/sessions/{things.session_id}/finish"
    assert stranger.http.post(session, json={}).status_code == 404
    for future in (things.sample_id, things.pass_id):
        cancelled = stranger.http.post("/api/v1/cancel_future", json={"request_id": future})
        assert cancelled.status_code == 200, "as for one that is not there"
    # A refused request uses up its number; a stranger's must not.
    following = served.post("optim_step", {"model_id": things.run_id, "seq_id": 10_000})
    assert following.status_code == 400
    content = binary(things.run_id, 9_999, [1, 2, 3], loss="nonsense")
    headers = {"Content-Type": "application/x-protobuf"}
    refused = stranger.http.post("/api/v1/forward_backward", content=content, headers=headers)
    assert refused.status_code == 404
    assert served.retrieve(f"{things.run_id}:9999").status_code == 404
    assert loss_of(client) > 0
    assert served.retrieve(things.sample_id).status_code == 200


def test_the_console_shows_a_key_its_own_models(stranger, owner, served):
    things = owner[2]
    theirs = stranger.client.get_info().model_id
    theirs_only = stranger.http.get("/api/v1/console/state").json()
    assert {row["model_id"] for row in theirs_only["models"]} >= {theirs}
    for path in ("console/state", "console/trace"):
        assert things.session_id not in stranger.http.get(f"/api/v1/{path}").text
        assert things.session_id in served.http.get(f"/api/v1/{path}").text
    report = f"/api/v1/console/runs/{things.run_id}"
    assert stranger.http.get(report).status_code == 404
    assert served.http.get(report).status_code == 200


def test_a_public_checkpoint_can_be_read_by_everybody_and_changed_by_its_owner_alone(
    stranger, owner, served
):
    _, client, things = owner
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    for path in (things.state, things.weights, things.external):
        rest.publish_checkpoint_from_tinker_path(path).result(timeout=LIMIT_S)
    copied = stranger.service.create_training_client_from_state(things.state)
    assert loss_of(copied.result(timeout=LIMIT_S)) == pytest.approx(loss_of(client), abs=1e-6)
    stranger.client.load_state(things.state).result(timeout=LIMIT_S)
    found = stranger.rest.list_checkpoints(things.run_id).result(timeout=LIMIT_S).checkpoints
    assert {c.tinker_path for c in found} == {things.state, things.weights, things.external}
    urls = stranger.rest.get_external_weights_urls(things.external).result(timeout=LIMIT_S).urls
    assert httpx.get(next(iter(urls.values()))).status_code == 200
    sampler = stranger.service.create_sampling_client(model_path=things.weights)
    handle = sampler.result(timeout=LIMIT_S).get_sampler_handle()
    sample = {
        **RAW["asample"](things),
        "sampling_session_id": sampler_id_in(handle),
    }
    assert stranger.http.post("/api/v1/asample", json=sample).status_code == 200
    own_copy = stranger.rest.copy_weights(things.state, "elsewhere").result(timeout=LIMIT_S)
    for change in (
        "delete_checkpoint_from_tinker_path",
        "publish_checkpoint_from_tinker_path",
        "unpublish_checkpoint_from_tinker_path",
    ):
        with pytest.raises(tinker.NotFoundError):
            getattr(stranger.rest, change)(things.state).result(timeout=LIMIT_S)
    with pytest.raises(tinker.NotFoundError):
        stranger.rest.get_training_run(things.run_id).result(timeout=LIMIT_S)
    for path in (things.state, things.weights, things.external):
        rest.unpublish_checkpoint_from_tinker_path(path).result(timeout=LIMIT_S)
    with pytest.raises(tinker.NotFoundError):
        stranger.service.create_training_client_from_state(things.state).result(timeout=LIMIT_S)
    gone = stranger.http.post("/api/v1/asample", json={**sample, "seq_id": 51})
    assert (gone.status_code, "not public any more" in gone.text) == (410, True)
    # The copy is the stranger's own, and not the owner's.
    stranger.service.create_training_client_from_state(own_copy).result(timeout=LIMIT_S)
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(own_copy).result(timeout=LIMIT_S)


def test_equal_copies_of_two_strangers_are_two(stranger, owner, served):
    things = owner[2]
    publish = f"training_runs/{things.run_id}/checkpoints/weights/mine/publish"
    assert served.post(publish, {}).status_code == 200
    body = {"source_path": things.state, "destination_project_id": "p"}
    headers = {"X-Idempotency-Key": "same"}
    theirs = stranger.http.post("/api/v1/copy_weights", json=body, headers=headers).json()
    mine = served.post("copy_weights", body, headers=headers).json()
    assert theirs["tinker_path"] != mine["tinker_path"]
    assert served.http.delete(f"/api/v1/{publish}").status_code == 200


def test_the_log_says_which_key_opened_deleted_published_and_copied_what(served, caplog):
    caplog.set_level("INFO", "lilo_engine.requests")
    model_id = served.model()
    saved = served.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"})
    path = served.finished(saved).json()["path"]
    below = f"training_runs/{model_id}/checkpoints/weights/x"
    served.post(f"{below}/publish", {})
    copied = served.post("copy_weights", {"source_path": path, "destination_project_id": "p"})
    served.http.delete(f"/api/v1/{below}")
    said = [re.sub(r"[0-9a-f]{12} ", "", r.message, count=1) for r in caplog.records]
    assert f"key published {path}" in said
    assert f"key copied {path} to {copied.json()['tinker_path']}" in said
    assert f"key deleted {path}" in said
    assert any(model_id.split(":")[0] in each and "opened session" in each for each in said)
