"""Two fronts over one engine: nothing depends on which of them a client talks to."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from lilo_engine.commands import frames
from lilo_engine.config import DataFolder
from lilo_engine.control.engine_address import EngineAddress
from lilo_engine.errors import NotFound, ServerError
from lilo_engine.remote.calls import EPOCH_HEADER, PREFIX
from lilo_engine.remote.line import open_line
from lilo_engine.requests.front import FrontSettings

from tests.conformance.conftest import KEY, Served
from tests.processes.conftest import engine_in_thread, front_in_thread

pytestmark = pytest.mark.anyio

PASS = {
    "forward_backward_input": {
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3, 4], "dtype": "int64"},
                    "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32"},
                },
            }
        ],
        "loss_fn": "cross_entropy",
    }
}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataFolder:
    folder = DataFolder(root=tmp_path_factory.mktemp("two-fronts"))
    folder.create()
    return folder


@pytest.fixture(scope="module")
def app(data):
    with engine_in_thread(data) as each:
        yield each


@pytest.fixture(scope="module")
def fronts(data, app) -> Iterator[tuple[Served, Served]]:
    """Two of them."""
    settings = FrontSettings(long_poll_s=2.0)
    headers = {"X-API-Key": KEY}
    with (
        front_in_thread(data, settings) as first,
        front_in_thread(data, settings) as second,
        httpx.Client(base_url=first, headers=headers, timeout=20) as one,
        httpx.Client(base_url=second, headers=headers, timeout=20) as two,
    ):
        both = tuple(
            Served(url=url, http=http, data_dir=data.root)
            for url, http in ((first, one), (second, two))
        )
        deadline = time.monotonic() + 20
        while any(each.http.get("/api/v1/healthz").status_code != 200 for each in both):
            assert time.monotonic() < deadline, "the fronts were not ready within 20 s"
        yield both


def test_a_result_is_fetched_through_either_front_and_numbers_go_on_through_both(fronts):
    one, two = fronts
    model_id = one.model()
    numbered = {"model_id": model_id, "seq_id": 1, **PASS}
    submitted = two.post("forward_backward", numbered)
    answers = [each.finished(submitted, accept="application/json").json() for each in fronts]
    assert answers[0] == answers[1]
    assert answers[0]["metrics"]["loss:sum"] > 0
    # A retry that reaches the other front is the same request.
    assert one.post("forward_backward", numbered).json() == submitted.json()
    stepped = one.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert "metrics" in two.finished(stepped).json()


def test_a_session_belongs_to_both_fronts(fronts):
    one, two = fronts
    session_id = one.session()
    assert two.post("session_heartbeat", {"session_id": session_id}).status_code == 200
    model_id = two.model(session_id)
    assert one.post(f"sessions/{session_id}/finish", {}).status_code == 200
    refused = two.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert refused.status_code == 410
    assert "finished" in refused.json()["detail"]
    # The other front looks at what ended every few seconds, and never takes it for one that never was.
    assert two.post("session_heartbeat", {"session_id": session_id}).status_code in (200, 410)


def test_a_saved_checkpoint_is_listed_loaded_and_deleted_through_the_other_front(fronts):
    one, two = fronts
    model_id = one.model()
    saved = one.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "kept"})
    path = two.finished(saved).json()["path"]
    listed = two.http.get(f"/api/v1/training_runs/{model_id}/checkpoints").json()["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path]
    body = {"session_id": two.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    assert "model_id" in one.finished(two.post("load_weights", body)).json()
    name = path.removeprefix(f"tinker://{model_id}/")
    removed = one.http.delete(f"/api/v1/training_runs/{model_id}/checkpoints/{name}")
    assert removed.status_code == 200
    assert two.http.get(f"/api/v1/training_runs/{model_id}/checkpoints/{name}").status_code == 404


def sampling(sampler_id: str, number: int) -> dict[str, object]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": number,
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 4, "seed": 3},
    }


def test_samples_are_taken_and_fetched_through_either_front(fronts):
    one, two = fronts
    sampler_id = one.sampler()
    answers = [
        other.finished(each.post("asample", sampling(sampler_id, 0)), "application/json").json()
        for each, other in ((one, two), (two, one))
    ]
    assert len(answers[0]["sequences"][0]["tokens"]) == 4
    assert answers[0] == answers[1]
    body = {"target": {"type": "sampling_session", "sampling_session_id": sampler_id}}
    polled = two.post("retrieve_futures", body).json()["completions"]
    assert [each["state"] for each in polled] == ["finished"]
    body = {"sampling_session_id": sampler_id}
    joined = [each.post("join_sampling_session", body).json() for each in fronts]
    assert len({each["client_counter"] for each in joined}) == 2


def test_a_snapshot_removed_through_one_front_is_gone_at_the_other_soon(fronts):
    one, two = fronts
    model_id = one.model()
    body = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    saved = one.finished(one.post("save_weights_for_sampler", body)).json()
    sampler_id = saved["sampling_session_id"]
    assert two.post("asample", sampling(sampler_id, 0)).status_code == 200
    snapshot = one.http.get(f"/api/v1/samplers/{sampler_id}").json()["model_path"]
    name = snapshot.removeprefix(f"tinker://{model_id}/")
    one.http.delete(f"/api/v1/training_runs/{model_id}/checkpoints/{name}")
    assert one.post("asample", sampling(sampler_id, 1)).status_code == 410
    deadline, number = time.monotonic() + 10, 2
    while (answer := two.post("asample", sampling(sampler_id, number))).status_code != 410:
        number += 1
        assert time.monotonic() < deadline, f"the front still samples: {answer.text}"


def test_weights_that_move_are_the_newest_for_the_front_that_did_not_save_them(fronts):
    one, two = fronts
    model_id = one.model()
    paths: list[str] = []
    for number in (1, 2, 3):
        body = {
            "model_id": model_id,
            "seq_id": number,
            "sampling_session_seq_id": 0,
            "kind": "inflight",
        }
        saved = one.finished(one.post("save_weights_for_sampler", body)).json()
        looked = two.http.get(f"/api/v1/samplers/{saved['sampling_session_id']}").json()
        paths.append(looked["model_path"])
    assert len(set(paths)) == 3, paths


def test_both_fronts_show_the_same_engine(fronts):
    states = [each.http.get("/api/v1/console/state").json() for each in fronts]
    assert states[0]["models"] == states[1]["models"]
    for each in fronts:
        text = each.http.get("/metrics").text
        assert 'lilo_engine_phase{phase="serving"} 1.0' in text
        assert "lilo_http_responses_total" in text


async def test_the_engine_answers_nobody_who_lacks_the_secret_or_means_another_engine(app):
    address = await EngineAddress(app.parts.control.records).find()
    right = {"authorization": f"Bearer {address.secret}", EPOCH_HEADER: str(address.epoch)}

    def status(**headers: str) -> int:
        url = f"{address.url}{PREFIX}/state"
        return httpx.post(url, content=frames.encode(()), headers=right | headers).status_code

    assert status() == 200
    assert status(authorization="Bearer something else") == 401
    assert status(authorization="") == 401
    assert status(**{EPOCH_HEADER: str(address.epoch - 1)}) == 421
    assert status(**{EPOCH_HEADER: ""}) == 421


async def test_a_call_that_does_not_exist_or_makes_no_sense_is_an_error_of_its_own(app):
    async with open_line(EngineAddress(app.parts.control.records).find) as line:
        with pytest.raises(NotFound, match="no method 'nothing'"):
            await line.call("nothing")
        with pytest.raises(ServerError, match="TypeError"):
            await line.call("retrieve")
        assert (await line.call("state")).phase == "serving"
