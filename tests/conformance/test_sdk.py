"""What a person does with the SDK, beyond the ten facts: saving, resuming, sampling from versions, looking around."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from lilo_engine.operations import ledger
from lilo_engine.sampling import futures
from tinker import types

from tests.conformance.test_ten_facts import ADAM, binary, example, send_binary, trainer

BATCH = [example([1, 2, 3, 4]), example([5, 6, 7])]


def loss_of(client: tinker.TrainingClient) -> float:
    return client.forward(BATCH, "cross_entropy").result(timeout=20).metrics["loss:sum"]


def step(client: tinker.TrainingClient) -> None:
    passed = client.forward_backward(BATCH, "cross_entropy")
    stepped = client.optim_step(ADAM)
    passed.result(timeout=20), stepped.result(timeout=20)


def draw(sampler: tinker.SamplingClient, seed: int = 1) -> list[int]:
    params = types.SamplingParams(max_tokens=6, seed=seed)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    return sampler.sample(prompt, 1, params).result(timeout=20).sequences[0].tokens


def test_a_run_resumed_with_its_optimizer_goes_on_as_if_it_had_never_stopped(service):
    client = trainer(service, seed=3)
    step(client), step(client)
    path = client.save_state("middle").result(timeout=20).path
    resumed = service.create_training_client_from_state_with_optimizer(path).result(timeout=20)
    step(client), step(resumed)
    assert loss_of(resumed) == pytest.approx(loss_of(client), abs=1e-6)


def test_training_state_and_sampler_weights_of_one_name_are_two_checkpoints(service):
    client = trainer(service)
    step(client)
    state = client.save_state("x").result(timeout=20).path
    weights = client.save_weights_for_sampler("x").result(timeout=20).path
    assert state != weights
    service.create_training_client_from_state_with_optimizer(state).result(timeout=20)


def test_a_name_is_taken_once_unless_overwriting_is_asked_for(service):
    client = trainer(service)
    client.save_state("best").result(timeout=20)
    with pytest.raises(tinker.RequestFailedError):
        client.save_state("best").result(timeout=20)
    client.save_state("best", overwrite=True).result(timeout=20)


def test_two_interleaved_clients_do_not_touch_each_other(service):
    alone, other = trainer(service, seed=5), trainer(service, seed=5)
    step(alone)
    expected = loss_of(alone)
    step(other)
    again = trainer(service, seed=5)
    step(again), step(other)
    assert loss_of(again) == expected


def test_the_lora_shape_of_a_restored_model_comes_from_the_checkpoint(service, rest):
    client = service.create_lora_training_client("tiny", rank=7, train_mlp=False).result(timeout=20)
    path = client.save_state("shape").result(timeout=20).path
    restored = service.create_training_client_from_state(path).result(timeout=20)
    assert restored.get_info().lora_rank == 7
    info = rest.get_weights_info_by_tinker_path(path).result(timeout=20)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)


def test_runs_and_checkpoints_are_listed_and_deleted(service, rest):
    client = trainer(service)
    path = client.save_state("gone", ttl_seconds=3600).result(timeout=20).path
    run_id = client.get_info().model_id
    assert rest.get_training_run(run_id).result(timeout=20).lora_rank == 4
    assert run_id in [
        run.training_run_id
        for run in rest.list_training_runs(limit=100).result(timeout=20).training_runs
    ]
    listed = rest.list_checkpoints(run_id).result(timeout=20).checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [path]
    assert listed[0].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=20)
    assert rest.list_checkpoints(run_id).result(timeout=20).checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state(path).result(timeout=20)


def test_a_long_result_is_announced_first_and_then_given(fussy):
    model_id = fussy.model()
    submitted = send_binary(fussy, binary(model_id, 1, list(range(40))))
    fussy.finished(submitted)
    request_id = submitted.json()["request_id"]
    announced = fussy.retrieve(request_id, allow_metadata_only=True).json()
    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] > 0
    given = fussy.retrieve(request_id, allow_metadata_only=False)
    assert given.headers["content-type"] == "application/x-protobuf"


def test_what_was_only_announced_is_kept_until_the_client_has_room_for_it(fussy, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_FETCHED_BYTES", 0)
    monkeypatch.setattr(futures, "MAX_FETCHED_BYTES", 0)
    model_id, sampler = fussy.model(), fussy.sampler()
    sample = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 40, "stop": []},
    }
    submitted = [send_binary(fussy, binary(model_id, n, list(range(40)))) for n in (1, 2, 3)]
    submitted += [fussy.post("asample", {**sample, "seq_id": n}) for n in (1, 2, 3)]
    ids = [answer.json()["request_id"] for answer in submitted]
    for request_id in ids:
        while (told := fussy.retrieve(request_id, allow_metadata_only=True)).status_code == 408:
            pass
        assert told.json()["status"] == "complete_metadata"
    for request_id in ids:
        assert fussy.retrieve(request_id).status_code == 200


def test_an_older_client_that_speaks_json_gets_the_same_answer(served):
    model_id = served.model()
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}},
    }
    body = {
        "model_id": model_id,
        "seq_id": 1,
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
    }
    sent = served.post("forward_backward", body)
    again = send_binary(served, binary(model_id, 1, [1, 2, 3]))
    assert again.json()["request_id"] == sent.json()["request_id"], "one payload, two encodings"
    passed = served.finished(sent, accept="application/json").json()
    assert passed["loss_fn_outputs"][0]["logprobs"]["shape"] == [2]


def test_a_finished_session_is_gone_with_its_models(served, monkeypatch):
    session_id = served.session()
    model_id = served.model(session_id)
    assert served.post("session_heartbeat", {"session_id": session_id}).status_code == 200
    body = {"reason": {"type": "success"}, "detail": None}
    assert served.post(f"sessions/{session_id}/finish", body).status_code == 200
    assert served.post(f"sessions/{session_id}/finish", body).status_code == 200
    gone = [
        served.post("session_heartbeat", {"session_id": session_id}),
        send_binary(served, binary(model_id, 1, [1, 2, 3])),
        served.post(
            "create_model", {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny"}
        ),
    ]
    assert [answer.status_code for answer in gone] == [410, 410, 410]


def test_a_heartbeat_of_an_unknown_session_is_an_error(served):
    assert served.post("session_heartbeat", {"session_id": "nobody"}).status_code == 404


def test_a_sample_that_is_cancelled_fails(served):
    body = {
        "sampling_session_id": served.sampler(),
        "seq_id": 0,
        "num_samples": 64,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1000, "stop": []},
    }
    submitted = served.post("asample", body)
    request_id = submitted.json()["request_id"]
    assert served.post("cancel_future", {"request_id": request_id}).status_code == 200
    assert "error" in served.finished(submitted).json()


def test_the_same_sample_sent_twice_runs_once(served):
    body = {
        "sampling_session_id": served.sampler(),
        "seq_id": 7,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 4},
    }
    first, again = served.post("asample", body), served.post("asample", body)
    assert first.json() == again.json()
    assert served.post("asample", {**body, "num_samples": 2}).status_code == 400


def test_a_wrong_key_is_refused_at_once(served):
    for key in ("", "tml-wrong"):
        answer = served.http.get("/api/v1/get_server_capabilities", headers={"X-API-Key": key})
        assert answer.status_code == 401
        assert answer.json()["detail"]
    assert served.http.get("/api/v1/healthz", headers={"X-API-Key": ""}).status_code == 200


def test_the_tokenizer_of_a_client_is_the_served_models(service):
    tokenizer = trainer(service).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("7+8=")) == "7+8="


def test_prompt_logprobs_start_with_none_and_top_k_has_k_columns(service):
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=20)
    values = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(timeout=20)
    assert values[0] is None
    assert np.isfinite(values[1:]).all()
