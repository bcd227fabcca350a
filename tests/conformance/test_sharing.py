"""Checkpoints for others, sessions as things to look for, and all samples by one poll; through the SDK where it can."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest
import tinker
from lilo_engine.requests.front import FrontSettings
from tinker import types

from tests.conformance.conftest import KEY, serve
from tests.conformance.test_sdk import loss_of, step
from tests.conformance.test_ten_facts import trainer

PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture(scope="module")
def one_poll(tmp_path_factory) -> Iterator[object]:
    """A server that has its clients ask for all samples at once."""
    settings = FrontSettings(long_poll_s=1.0, one_poll_per_sampler=True)
    yield from serve(tmp_path_factory.mktemp("one-poll"), settings)


def run_id_of(path: str) -> str:
    return path.removeprefix("tinker://").split("/")[0]


def external(served, client: tinker.TrainingClient, seq_id: int, name: str = "out") -> str:
    """Save for download, which the SDK's training client has no method for."""
    body = {"model_id": client.get_info().model_id, "seq_id": seq_id, "path": name}
    saved = served.finished(served.post("save_weights_external", body)).json()
    assert saved["size_bytes"] > 0
    return saved["path"]


def test_weights_saved_for_download_are_fetched_by_links_that_need_no_key(served, service, rest):
    client = trainer(service)
    path = external(served, client, 1)
    assert path.endswith("/external_weights/out")
    found = rest.get_external_weights_urls(path).result(timeout=20)
    assert found.expires.timestamp() > time.time() + 3000
    for url in found.urls.values():
        assert httpx.get(url).status_code == 200
        assert httpx.get(url.replace("signature=", "signature=0")).status_code == 401
        assert httpx.get(url.replace("expires=", "expires=9")).status_code == 401
        assert httpx.get(url.split("?")[0]).status_code == 401
        assert httpx.get(url.replace("/external_weights/", "/weights/")).status_code == 401
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=20)
    assert {httpx.get(url).status_code for url in found.urls.values()} == {404}


def test_a_link_behind_a_proxy_that_ends_tls_has_the_address_that_its_client_used(served, service):
    path = external(served, trainer(service), 1)
    url = f"training_runs/{run_id_of(path)}/checkpoints/external_weights/out/external_weights_urls"
    headers = {"Host": "lilo.example.org", "X-Forwarded-Proto": "https"}
    urls = served.http.get(f"/api/v1/{url}", headers=headers).json()["urls"]
    assert all(each.startswith("https://lilo.example.org/api/v1/") for each in urls.values())


def test_a_link_ends_when_what_it_was_made_for_is_replaced(served, service, rest):
    client = trainer(service)
    path = external(served, client, 1)
    old = rest.get_external_weights_urls(path).result(timeout=20).urls
    external(served, client, 2)
    assert {httpx.get(url).status_code for url in old.values()} == {404}


def test_a_training_state_has_no_links_and_the_refusal_says_what_has(served, service):
    client = trainer(service)
    path = client.save_state("s").result(timeout=20).path
    url = f"/api/v1/training_runs/{run_id_of(path)}/checkpoints/weights/s/external_weights_urls"
    refused = served.http.get(url)
    assert refused.status_code == 400
    assert "save_weights_external" in refused.json()["detail"]


def test_encryption_is_refused_in_words_and_uses_up_its_number(served):
    model_id = served.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "x", "age_encryption_recipients": ["age1x"]}
    refused = served.post("save_weights_external", body)
    assert refused.status_code == 400
    assert "TLS" in refused.json()["detail"]
    del body["age_encryption_recipients"]
    assert served.finished(served.post("save_weights_external", {**body, "seq_id": 2})).json()[
        "path"
    ]


def test_a_checkpoint_is_public_from_publish_to_unpublish(service, rest):
    client = trainer(service)
    path = client.save_state("p").result(timeout=20).path

    def is_public() -> bool:
        found = rest.list_checkpoints(run_id_of(path)).result(timeout=20).checkpoints
        return found[0].public

    assert not is_public()
    rest.publish_checkpoint_from_tinker_path(path).result(timeout=20)
    assert is_public()
    rest.unpublish_checkpoint_from_tinker_path(path).result(timeout=20)
    assert not is_public()
    with pytest.raises(tinker.NotFoundError):
        rest.publish_checkpoint_from_tinker_path(f"{path}-not").result(timeout=20)


def test_a_copy_is_a_checkpoint_of_its_own(service, rest):
    client = trainer(service, seed=4)
    step(client)
    path = client.save_state("origin").result(timeout=20).path
    copied = rest.copy_weights(path, "elsewhere", ttl_seconds=3600).result(timeout=20)
    assert copied.endswith("/weights/origin")
    assert run_id_of(copied) != run_id_of(path)
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=20)
    again = service.create_training_client_from_state_with_optimizer(copied).result(timeout=20)
    assert loss_of(again) == loss_of(client)
    (entry,) = rest.list_checkpoints(run_id_of(copied)).result(timeout=20).checkpoints
    assert entry.expires_at is not None


def test_the_same_copy_again_is_the_same_checkpoint_and_another_one_is_refused(served, service):
    client = trainer(service)
    first = client.save_state("w").result(timeout=20).path
    body = {"source_path": first, "session_id": served.session(), "model_seq_id": 5}
    answers = [served.post("copy_weights", body).json()["tinker_path"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0] != first
    client.save_state("w", overwrite=True).result(timeout=20)
    assert served.post("copy_weights", body).status_code == 400
    assert served.post("copy_weights", {"source_path": first}).status_code == 400
    live = {**body, "session_id": run_id_of(first).split(":")[0], "model_seq_id": 0}
    assert served.post("copy_weights", live).status_code == 400


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_sessions_are_found_by_what_their_clients_said_of_them(served, service, rest):
    ids = [
        served.post(
            "create_session",
            {"display_name": f"Nightly run {n}", "user_metadata": {"team": "red"}, "tags": []},
        ).json()["session_id"]
        for n in range(3)
    ]
    served.post(f"sessions/{ids[0]}/finish", {"reason": {"type": "errored"}, "detail": "boom"})
    rest.assign_session_project(ids[1], "apollo").result(timeout=20)
    born = served.post("create_session", {"project_id": "gemini"}).json()["session_id"]

    def found(**query: object) -> list[str]:
        request = types.SessionSearchRequest.model_validate(query)
        return [s.session_id for s in rest.search_sessions(request).result(timeout=20).sessions]

    assert found(display_name="RUN nightly") == ids[::-1]
    assert found(user_metadata={"team": "red"}) == ids[::-1]
    assert found(project_ids=["apollo"]) == [ids[1]]
    assert found(project_ids=["gemini"]) == [born]
    failed = {"type": "client_finished", "reasons": ["errored"]}
    assert found(display_name="nightly", statuses=[failed]) == [ids[0]]
    assert found(display_name="nightly", statuses=[{"type": "active"}]) == ids[:0:-1]
    assert found(session_id=ids[0], display_name="nothing like it") == [ids[0]]
    page = rest.search_sessions(types.SessionSearchRequest(display_name="nightly", limit=2))
    first = page.result(timeout=20)
    rest_of = rest.search_sessions(
        types.SessionSearchRequest(display_name="nightly", limit=2, cursor=first.next_cursor)
    ).result(timeout=20)
    assert [s.session_id for s in [*first.sessions, *rest_of.sessions]] == ids[::-1]
    assert rest_of.next_cursor is None
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("nobody", "x").result(timeout=20)


def test_a_session_is_exported_as_a_timeline(service, rest):
    client = trainer(service)
    run_id = client.get_info().model_id
    client.save_state("mark").result(timeout=20)
    url = rest.export_session_trace(run_id.split(":train:")[0]).result(timeout=20)
    events = json.loads(httpx.get(url).content)["traceEvents"]
    assert {"weights/mark"} <= {event["name"] for event in events}
    assert run_id in [event.get("args", {}).get("id") for event in events]
    assert httpx.get(url.split("?")[0]).status_code == 401


def test_the_sdk_gets_all_that_it_can_ask_about_a_prompt(service):
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=20)
    scores = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result(timeout=20)
    assert scores[:2] == [None, None]
    assert scores[2] is not None
    targets = types.TensorData(data=[2, -1, 3, 9], dtype="int64", shape=[2, 2])
    answer = sampler.sample(
        PROMPT,
        1,
        types.SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=3,
    ).result(timeout=20)
    table = answer.target_prompt_logprobs.to_numpy()
    assert table.shape == (2, 2)
    assert table[:, 0].tolist() == pytest.approx(answer.prompt_logprobs[1:])
    assert table[0, 1] == 0
    assert answer.prompt_alt_tokens.tokens.to_numpy().shape == (2, 3)


def test_one_poll_answers_for_all_samples_of_a_client(one_poll, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=one_poll.url, api_key=KEY)
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=20)
    params = types.SamplingParams(max_tokens=3, seed=1)
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(40)]
    answers = [future.result(timeout=20).sequences[0].tokens for future in futures]
    assert answers == [answers[0]] * 40
    service.close("success").result(timeout=20)


def test_polls_for_completions_go_on_from_their_cursor_and_each_client_sees_its_own(served):
    session_id = served.sampler()

    def sample(seq_id: int) -> str:
        body = {
            "sampling_session_id": session_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        }
        submitted = served.post("asample", body)
        served.finished(submitted)
        return submitted.json()["request_id"]

    def poll(clone: int = 0, **more: object) -> dict[str, object]:
        target = {
            "type": "sampling_session",
            "sampling_session_id": session_id,
            "cloned_sampler_id": clone,
        }
        answer = served.post("retrieve_futures", {"target": target, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    first, other = sample(0), sample(10**9)
    seen = poll()
    assert [one["request_id"] for one in seen["completions"]] == [first]
    assert [one["request_id"] for one in poll(1)["completions"]] == [other]
    assert poll() == seen, "an answer that was lost on its way is given again"
    assert poll(prev_cursor=seen["cursor"], timeout=0)["completions"] == []
    second = sample(1)
    later = poll(prev_cursor=seen["cursor"], retrieved_request_ids=[first, other])
    assert [one["request_id"] for one in later["completions"]] == [second]
    assert served.retrieve(first).status_code == 410, "forgotten; sent again, it would be done anew"
    assert served.retrieve(other).status_code == 200, "another client's answer stays"
    joined = [
        served.post("join_sampling_session", {"sampling_session_id": session_id}).json()
        for _ in range(2)
    ]
    assert [one["client_counter"] for one in joined] == [1, 2]
    target = {"type": "sampling_session", "sampling_session_id": session_id}
    gone = served.post("retrieve_futures", {"target": target, "prev_cursor": 5})
    assert gone.status_code == 410
    nobody = {**target, "sampling_session_id": "nobody"}
    assert served.post("retrieve_futures", {"target": nobody}).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "create_custom_loss", "forward_backward_custom"),
        ("POST", "auth/token", "lilo keys"),
        ("GET", "auth/apikey/me", "lilo keys"),
        ("GET", "audit", "log"),
        ("GET", "billing/usage/events", "billed"),
    ],
)
def test_what_is_not_offered_is_refused_with_what_there_is_instead(served, method, path, instead):
    options = {"json": {}} if method == "POST" else {}
    refused = served.http.request(method, f"/api/v1/{path}", **options)
    assert refused.status_code == 404
    assert instead in refused.json()["detail"]
