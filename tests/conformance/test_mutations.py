"""Mutated bodies: whatever comes in, the answer is a refusal in words or a future, at once, and the server goes on."""

from __future__ import annotations

import random
import time

import pytest

from tests.conformance.mutations import good_pass, mutated, mutated_json
from tests.conformance.test_ten_facts import binary, send_binary

LIMIT_S = 2.0


def check(answer, began: float, body: bytes) -> None:
    assert answer.status_code < 500, (body, answer.text)
    assert answer.status_code == 200 or answer.json()["detail"]
    assert time.monotonic() - began < LIMIT_S, body


@pytest.mark.parametrize("seed", range(3))
def test_mutated_binary_bodies_are_refused_or_run_and_the_model_goes_on(served, seed):
    rng, model_id = random.Random(seed), served.model()
    for seq_id in range(1, 101):
        good = good_pass(model_id, seq_id, rng)
        body = mutated(good, rng)
        # The good one takes the number where the mutated one could not: none is left out.
        for content in (body, good):
            began = time.monotonic()
            check(send_binary(served, content), began, content)
    last = {"model_id": model_id, "seq_id": 101, "adam_params": {}}
    assert served.finished(served.post("optim_step", last)).status_code == 200
    assert served.http.get("/api/v1/healthz").status_code == 200
    other = served.model()
    answer = served.finished(send_binary(served, binary(other, 1, [1, 2, 3])))
    assert answer.headers["content-type"] == "application/x-protobuf"


BODIES = {
    "optim_step": {"seq_id": 1, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
    "save_weights": {"seq_id": 1, "path": "x", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
    "save_weights_for_sampler": {"seq_id": 1, "path": "x", "kind": "snapshot"},
    "save_weights_external": {"seq_id": 1, "path": "x", "age_encryption_recipients": []},
    "load_weights": {"seq_id": 1, "path": "tinker://r/weights/x", "optimizer": True},
    "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0"},
    "create_model": {"model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 4}},
    "copy_weights": {"source_path": "tinker://r/weights/x", "destination_project_id": "p"},
    "sessions/search": {
        "display_name": "x",
        "statuses": [{"type": "client_finished", "reasons": ["success"]}],
        "cursor": {"last_created_at": "2026-01-01T00:00:00+00:00", "last_session_id": "s"},
        "owner": {"type": "own"},
    },
    "retrieve_futures": {
        "target": {"type": "sampling_session", "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0,
        "retrieved_request_ids": ["sample:x:1"],
    },
    "retrieve_future": {"request_id": "sample:x:1", "allow_metadata_only": True},
    "asample": {
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2, "seed": 1, "temperature": 1.0, "stop": [5]},
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {
            "data": [1],
            "dtype": "int64",
            "shape": [2, 4],
            "sparse_crow_indices": [0, 1, 1],
            "sparse_col_indices": [0],
        },
    },
}


@pytest.mark.parametrize("call", BODIES)
def test_mutated_json_bodies_are_refused_or_run(request, call):
    # One of the two polls for a moment only, which a body without a limit of its own asks for.
    served = request.getfixturevalue("fussy" if call == "retrieve_futures" else "served")
    rng = random.Random(call)
    session_id = served.session()
    known = {
        "model_id": served.model(session_id),
        "session_id": session_id,
        "sampling_session_id": served.sampler(),
    }
    body = {**BODIES[call], **known}
    if call == "retrieve_futures":
        body["target"] = {**body["target"], "sampling_session_id": known["sampling_session_id"]}
    for _ in range(40):
        content = mutated_json(body, rng)
        began = time.monotonic()
        headers = {"Content-Type": "application/json"}
        check(served.post(call, content=content, headers=headers), began, content)
    served.post(f"sessions/{session_id}/finish", {})
    assert served.http.get("/api/v1/healthz").status_code == 200
