"""Limits of one key: what is over them is refused in words, and costs the client nothing but time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import tinker
from lilo_engine.bench.wire import Wire, held_polls, num_waiting_polls
from lilo_engine.control.access import KeyLimits
from lilo_engine.control.keys import Keys
from lilo_engine.control.records import Records

from tests.conformance.test_sdk import step
from tests.conformance.test_ten_facts import binary, trainer

LIMIT_S = 20
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@contextmanager
def key_with(served, **limits: float) -> Iterator[httpx.Client]:
    """A client with a key of its own, which another process made."""
    records = Records.at(served.data_dir)
    key = Keys(records).create("limited", time.time(), limits=KeyLimits(**limits))
    records.close()
    # A server looks for unknown keys once a second.
    deadline = time.monotonic() + LIMIT_S
    with httpx.Client(base_url=served.url, headers={"X-API-Key": key}, timeout=LIMIT_S) as http:
        while http.get("/api/v1/get_server_capabilities").status_code == 401:
            assert time.monotonic() < deadline
        yield http


def model_of(http: httpx.Client) -> str:
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    created = http.post("/api/v1/create_model", json=body).json()["request_id"]
    while http.post("/api/v1/retrieve_future", json={"request_id": created}).status_code == 408:
        pass
    return f"{session}:train:0"


def test_a_key_over_its_rate_is_told_when_to_try_again_and_others_are_not(served):
    with key_with(served, rate_per_s=2.0) as http:
        path = "/api/v1/sessions"
        answers = [http.get(path) for _ in range(6)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused, [answer.status_code for answer in answers]
        assert refused[0].json()["kind"] == "rate_limited"
        wait_ms = float(refused[0].headers["retry-after-ms"])
        assert 0 < wait_ms <= 500
        assert int(refused[0].headers["retry-after"]) == 1
        assert served.http.get(path).status_code == 200
        # Polls and heartbeats begin nothing, and are never refused.
        beats = [
            http.post("/api/v1/session_heartbeat", json={"session_id": "nobody"}) for _ in range(20)
        ]
        assert {beat.status_code for beat in beats} == {404}


@pytest.mark.timeout(60)
def test_the_sdk_goes_on_at_the_rate_of_its_key(served, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with key_with(served, rate_per_s=10.0) as http:
        service = tinker.ServiceClient(base_url=served.url, api_key=http.headers["X-API-Key"])
        client = trainer(service)
        began = time.monotonic()
        for _ in range(10):
            step(client)  # two requests that begin something
        assert time.monotonic() - began > 0.8, "20 requests at 10 a second, 10 of them at once"
        service.close("success").result(timeout=LIMIT_S)


def test_a_body_over_the_keys_limit_is_refused_with_its_number(served):
    with key_with(served, max_body_bytes=2000) as http:
        model_id = model_of(http)
        large = binary(model_id, 1, [1] * 1000)
        refused = http.post("/api/v1/forward_backward", content=large, headers=PROTOBUF)
        assert (refused.status_code, refused.json()["kind"]) == (413, "too_large")
        small = binary(model_id, 2, [1, 2, 3])
        taken = http.post("/api/v1/forward_backward", content=small, headers=PROTOBUF)
        assert taken.status_code == 200
        done = {"request_id": taken.json()["request_id"]}
        headers = {"Accept": "application/x-protobuf"}
        answer = http.post("/api/v1/retrieve_future", json=done, headers=headers)
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    other = served.model()
    as_large = binary(other, 1, [1] * 1000)
    assert served.post("forward_backward", content=as_large, headers=PROTOBUF).status_code != 413


def test_operations_that_wait_have_their_keys_room_and_no_more(served):
    with key_with(served, max_waiting_bytes=10_000) as http:
        model_id = model_of(http)

        def send(seq_id: int, tokens: int = 100) -> httpx.Response:
            content = binary(model_id, seq_id, [1] * tokens)
            return http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)

        # Number 1 does not come, so that all others wait.
        sent = [send(seq_id).status_code for seq_id in range(2, 20)]
        assert sent[0] == 200
        assert sent[-1] == 429
        refused = send(19)
        assert refused.json()["kind"] == "saturated"
        assert "await results" in refused.json()["detail"]
        # What they wait for has room, and then so have the others.
        assert send(1).status_code == 200
        last = {"request_id": f"{model_id}:2"}
        while http.post("/api/v1/retrieve_future", json=last).status_code == 408:
            pass
        assert send(19).status_code == 200


def sampler_of(http: httpx.Client) -> str:
    session = http.post("/api/v1/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    return http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]


def asample(http: httpx.Client, sampler: str, seq_id: int, **more: int) -> httpx.Response:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": more.get("num_samples", 1),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [50, 51]}]},
        "sampling_params": {"max_tokens": more.get("max_tokens", 1), "seed": 1, "stop": []},
    }
    return http.post("/api/v1/asample", json=body)


def test_samples_that_wait_have_their_keys_room_and_no_more(served):
    endless = {"num_samples": 64, "max_tokens": 1000}
    with key_with(served, max_waiting_bytes=700_000) as http:
        sampler = sampler_of(http)
        first = asample(http, sampler, 0, **endless)
        assert first.status_code == 200, first.text
        refused = asample(http, sampler, 1, **endless)
        assert (refused.status_code, refused.json()["kind"]) == (429, "saturated")
        assert "await results" in refused.json()["detail"]
        assert asample(served.http, sampler_of(served.http), 0).status_code == 200
        http.post("/api/v1/cancel_future", json={"request_id": first.json()["request_id"]})
        assert asample(http, sampler, 1, **endless).status_code == 200


def test_samples_have_their_keys_rate(served):
    with key_with(served, rate_per_s=4.0) as http:
        sampler = sampler_of(http)
        statuses = [asample(http, sampler, number).status_code for number in range(10)]
        assert statuses.count(429) >= 4, statuses
        assert statuses[0] == 200


def test_bodies_that_are_being_read_have_their_keys_room_and_no_more(served):
    with key_with(served, max_waiting_bytes=100_000) as http:
        host, port = served.url.removeprefix("http://").split(":")
        head = (
            "POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"X-API-Key: {http.headers['X-API-Key']}\r\nContent-Length: 90000\r\n\r\n"
        )
        body = {"events": ["x" * 20_000]}
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as slow:
            slow.sendall(head.encode() + b"{")
            deadline = time.monotonic() + LIMIT_S
            while True:
                answer = http.post("/api/v1/telemetry", json=body)
                if answer.status_code == 429 or time.monotonic() > deadline:
                    break
            assert answer.status_code == 429
            assert "are being read" in answer.json()["detail"]
        while http.post("/api/v1/telemetry", json=body).status_code == 429:
            assert time.monotonic() < deadline, "the place of a body that never came is given back"
    assert served.post("telemetry", body).status_code == 200


def test_many_at_once_of_a_limited_key_leave_the_server_quick_for_others(served):
    with key_with(served, rate_per_s=1.0) as http:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            flood = [pool.submit(http.get, "/api/v1/sessions") for _ in range(200)]
            began = time.monotonic()
            assert served.http.get("/api/v1/get_server_capabilities").status_code == 200
            assert time.monotonic() - began < 5
        counts = [each.result().status_code for each in flood]
    assert counts.count(429) > 150
    assert set(counts) <= {200, 429}


def test_clients_that_leave_take_their_polls_along(served):
    model_id = served.model()
    # Number 1 does not come, so that this one never ends.
    waiting = binary(model_id, 2, [1, 2, 3])
    request_id = served.post("forward_backward", content=waiting, headers=PROTOBUF).json()[
        "request_id"
    ]
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"request_id": request_id}).encode()
    head = (
        f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {served.http.headers['X-API-Key']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    def polls() -> float:
        lines = served.http.get("/metrics").text.splitlines()
        return next(
            float(line.split()[1]) for line in lines if line.startswith("lilo_waiting_polls ")
        )

    before = polls()
    with contextlib.ExitStack() as clients:
        for _ in range(64):
            each = clients.enter_context(socket.create_connection((host, int(port))))
            each.sendall(head.encode() + body)
        deadline = time.monotonic() + LIMIT_S
        while polls() < before + 64:
            assert time.monotonic() < deadline
    deadline = time.monotonic() + 5
    while polls() > before:
        assert time.monotonic() < deadline, "a poll that nobody waits for ends before its 25 s"


@pytest.mark.timeout(60)
def test_polls_that_are_held_to_measure_something_are_gone_before_the_next_are_counted(served):
    model_id = served.model()
    # Number 1 does not come, so that this one never ends.
    parked = served.post("forward_backward", content=binary(model_id, 2, [1, 2]), headers=PROTOBUF)
    request_ids, key = [parked.json()["request_id"]], served.http.headers["X-API-Key"]
    with Wire(served.url, key) as wire:
        deadline = time.monotonic() + LIMIT_S
        while num_waiting_polls(wire):
            assert time.monotonic() < deadline, "polls of earlier tests end"
        for count in (32, 64):
            with held_polls(served.url, request_ids, count, key):
                assert num_waiting_polls(wire) == count
            assert num_waiting_polls(wire) == 0
