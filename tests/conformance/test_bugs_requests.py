"""Faults B01 to B12 that others met with requests, order, retries and futures, each tried here; named after them.

Most have tests of their own elsewhere too, from the inside; these go through the socket.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.requests.front import FrontSettings
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk_pb

from tests.conformance.conftest import serve
from tests.conformance.test_bad_input import datum, request
from tests.conformance.test_ten_facts import ADAM, binary, example, send_binary, trainer
from tests.engine.conftest import HeldBackend

DATA = [example([1, 2, 3, 4]), example([5, 6, 7])]


def step_body(model_id: str, seq_id: int, rate: float = 1e-2) -> dict[str, object]:
    adam = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": adam}


def scores(served, model_id: str, seq_id: int) -> list[float]:
    """Logprobs of a forward pass: equal for equal weights."""
    message = request(model_id)
    message.seq_id, message.forward_only = seq_id, True
    datum(message, [1, 2, 3], target_tokens=[2, 3, 4])
    answer = served.finished(send_binary(served, message.SerializeToString()))
    output = sdk_pb.ForwardBackwardOutput.FromString(answer.content)
    data = output.loss_fn_outputs[0].fields["logprobs"].data
    return np.frombuffer(data, "<f4").tolist()


def test_b01_a_call_that_is_sent_again_runs_once(served):
    once, again = (served.model(lora_config={"rank": 4, "seed": 1}) for _ in range(2))
    for model_id, copies in ((once, 1), (again, 3)):
        for _ in range(copies):
            passed = send_binary(served, binary(model_id, 1, [1, 2, 3, 4]))
        for _ in range(copies):
            stepped = served.post("optim_step", step_body(model_id, 2))
        served.finished(passed), served.finished(stepped)
    assert scores(served, once, 3) == scores(served, again, 3)


def test_b01_racing_copies_name_one_future_and_other_payloads_are_refused(served):
    model_id = served.model()
    body = binary(model_id, 1, [1, 2, 3, 4])
    barrier = threading.Barrier(8)

    def send(_: int) -> str:
        barrier.wait(10)
        return send_binary(served, body).json()["request_id"]

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(send, range(8)))) == 1
    for refused in (
        send_binary(served, binary(model_id, 1, [9, 9, 9])),
        served.post("optim_step", step_body(model_id, 1)),
    ):
        assert refused.status_code == 400
    fresh = send_binary(served, binary(model_id, 2, [1, 2, 3, 4])).json()["request_id"]
    assert fresh != send_binary(served, body).json()["request_id"]


def test_b01_a_save_and_a_creation_that_are_sent_again_happen_once(served):
    session_id = served.session()
    model_id = served.model(session_id)
    assert served.model(session_id) == model_id
    save = {"model_id": model_id, "seq_id": 1, "path": "once"}
    first, second = (served.post("save_weights", save) for _ in range(2))
    assert first.json() == second.json()
    assert served.finished(second).json()["path"] == f"tinker://{model_id}/weights/once"


def test_b02_a_step_never_overtakes_the_pass_before_it(service):
    sent, awaited = trainer(service, seed=2), trainer(service, seed=2)
    futures = []
    for n in range(3):
        futures += [sent.forward_backward([DATA[n % 2]], "cross_entropy"), sent.optim_step(ADAM)]
    for future in futures:
        future.result(timeout=20)
    for n in range(3):
        awaited.forward_backward([DATA[n % 2]], "cross_entropy").result(timeout=20)
        awaited.optim_step(ADAM).result(timeout=20)
    assert losses(sent) == losses(awaited)


def losses(client: tinker.TrainingClient) -> list[list[float]]:
    passed = client.forward(DATA, "cross_entropy").result(timeout=20)
    return [record["logprobs"].tolist() for record in passed.loss_fn_outputs]


def test_b03_every_chunk_of_a_large_batch_trains(service):
    whole, pieces = trainer(service, seed=3), trainer(service, seed=3)
    idle = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": types.TensorData([2, 3], "int64", [2]),
            "weights": types.TensorData([0.0, 0.0], "float32", [2]),
        },
    )
    # The SDK cuts at 1,024 data: the second request holds nothing but weights of zero.
    many = [DATA[n % 2] for n in range(1024)] + [idle] * 8
    whole.forward_backward(many, "cross_entropy").result(timeout=60)
    for start in range(0, 1024, 256):
        pieces.forward_backward(many[start : start + 256], "cross_entropy").result(timeout=60)
    for client in (whole, pieces):
        client.optim_step(ADAM).result(timeout=20)
    for one, other in zip(losses(whole), losses(pieces), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    with pytest.raises(tinker.RequestFailedError):
        whole.optim_step(ADAM).result(timeout=20)


@pytest.fixture
def stopping(tmp_path):
    """A server whose trainer stops before each pass until it is told to go on, and that trainer."""
    launchers = []

    def launcher(definition, data):
        launchers.append(
            MemoryLauncher(
                definition=definition, checkpoints_root=data.checkpoints, factory=HeldBackend
            )
        )
        return launchers[0]

    for served in serve(tmp_path, FrontSettings(long_poll_s=0.2), launcher=launcher):
        while served.http.get("/api/v1/healthz").status_code != 200:
            pass
        yield served, launchers[0].started[-1].backend


def test_b04_a_small_client_does_not_wait_for_a_large_one(stopping):
    served, backend = stopping
    small, large = served.model(), served.model()

    def one_more() -> None:
        """Let the pass that stands go on, up to where the next one stands."""
        gate = backend.held["forward_backward"]
        backend.hold("forward_backward")
        gate.set()
        assert backend.reached["forward_backward"].wait(10)

    def send(seq_id: int) -> httpx.Response:
        message = request(large)
        message.seq_id = seq_id
        for _ in range(64):
            datum(message, list(range(100)), target_tokens=list(range(100)))
        return send_binary(served, message.SerializeToString())

    backend.hold("forward_backward")
    waiting = [send(1)]
    assert backend.reached["forward_backward"].wait(10)
    waiting += [send(seq_id) for seq_id in range(2, 33)]
    quick = send_binary(served, binary(small, 1, [1, 2, 3]))
    one_more()
    one_more()
    # One command was running when it came; it was in the next one, and is answered when that is done.
    assert served.finished(quick).headers["content-type"] == "application/x-protobuf"
    assert served.retrieve(waiting[-1].json()["request_id"]).status_code == 408
    ran = [entry[1:] for entry in backend.log if entry[0] == "forward_backward"]
    assert [f"{small}:1" in operations for operations in ran] == [False, True, False]
    backend.let_go("forward_backward")
    for submitted in waiting:
        assert served.finished(submitted).status_code == 200


def test_b05_many_parked_requests_and_waiting_clients_do_not_slow_a_heartbeat(served):
    session_id = served.session()
    model_id = served.model(session_id)
    parked = []
    for seq_id in range(2, 130):
        message = request(model_id)
        message.seq_id = seq_id
        datum(message, [1] * 900, target_tokens=[1] * 900)
        parked.append(send_binary(served, message.SerializeToString()).json()["request_id"])
    ended = threading.Event()

    def wait_for(request_id: str) -> int:
        while not ended.is_set():
            status = served.retrieve(request_id).status_code
            if status != 408:
                return status
        return 408

    took = []
    with ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(wait_for, request_id) for request_id in parked[:32]]
        for _ in range(40):
            began = time.monotonic()
            beat = served.post("session_heartbeat", {"session_id": session_id})
            took.append(time.monotonic() - began)
            assert beat.status_code == 200
        served.finished(send_binary(served, binary(model_id, 1, [1, 2, 3])))
        assert {answer.result(timeout=30) for answer in answers} == {200}
        ended.set()
    # One process holds the server and its clients here; the figure of the engine alone is in its benchmark.
    assert sorted(took)[len(took) // 2] < 0.25


def test_b07_a_call_that_failed_for_good_raises_at_once_with_its_cause(service):
    client = trainer(service)
    began = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match="cross_entropy"):
        client.forward_backward(DATA, "no_such_loss").result(timeout=20)
    assert time.monotonic() - began < 2
    client.forward_backward(DATA, "cross_entropy").result(timeout=20)


def test_b09_numbers_of_two_sampling_clients_are_their_own(service):
    client = trainer(service)
    params = types.SamplingParams(max_tokens=4, seed=1)
    first = service.create_sampling_client(base_model="tiny").result(timeout=20)
    second = service.create_sampling_client(base_model="tiny").result(timeout=20)
    prompts = [types.ModelInput.from_ints([n, n + 1]) for n in (1, 50)]
    answers = [
        sampler.sample(prompt, 1, params).result(timeout=20).sequences[0].tokens
        for sampler, prompt in ((first, prompts[0]), (second, prompts[1]), (first, prompts[1]))
    ]
    assert answers[1] == answers[2]
    assert answers[0] != answers[1]
    assert client.get_info().model_id


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "zstd"])
def test_b10_passes_are_binary_whether_packed_or_not(served, packed):
    model_id = served.model()
    body, headers = binary(model_id, 1, [1, 2, 3]), {}
    if packed:
        body, headers = zstandard.ZstdCompressor().compress(body), {"Content-Encoding": "zstd"}
    answer = served.finished(send_binary(served, body, **headers))
    assert sdk_pb.ForwardBackwardOutput.FromString(answer.content).loss_fn_outputs


def test_b10_an_older_client_passes_forward_in_json(served):
    model_id = served.model()
    one = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}},
    }
    body = {"model_id": model_id, "seq_id": 1}
    asked = {"data": [one], "loss_fn": "cross_entropy"}
    sent = served.post("forward", {**body, "forward_input": asked})
    answer = served.finished(sent, accept="application/json").json()
    assert answer["loss_fn_outputs"][0]["logprobs"]["shape"] == [2]
    with_gradients = served.post("optim_step", step_body(model_id, 2))
    assert served.finished(with_gradients).json()["category"] == "user"


def test_b10_one_call_restores_a_client_under_the_id_that_the_sdk_builds(served):
    model_id = served.model()
    saved = served.finished(
        served.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"})
    ).json()["path"]
    session_id = served.session()
    body = {"session_id": session_id, "model_seq_id": 3, "path": saved, "optimizer": True}
    restored = served.finished(served.post("load_weights", body)).json()
    assert restored["model_id"] == f"{session_id}:train:3"


def test_b12_a_heartbeat_of_nobody_is_an_error_and_a_finished_session_is_gone(served):
    assert served.post("session_heartbeat", {"session_id": "nobody"}).status_code == 404
    session_id = served.session()
    model_id = served.model(session_id)
    served.post(f"sessions/{session_id}/finish", {})
    gone = served.post("session_heartbeat", {"session_id": session_id})
    assert gone.status_code == 410
    late = send_binary(served, binary(model_id, 1, [1, 2, 3]))
    assert late.status_code == 410
    assert "checkpoint" in late.json()["detail"]
