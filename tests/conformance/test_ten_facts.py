"""The ten facts of the protocol that break a server first, each as one test (or two, where it has two sides)."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk_pb

ADAM = types.AdamParams(learning_rate=1e-2)


def example(tokens: list[int]) -> types.Datum:
    targets = tokens[1:]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(targets, "int64", [len(targets)]),
            "weights": types.TensorData([1.0] * len(targets), "float32", [len(targets)]),
        },
    )


def binary(model_id: str, seq_id: int, tokens: list[int], loss: str = "cross_entropy") -> bytes:
    """A forward_backward body, made with the SDK's own messages."""
    message = sdk_pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = sdk_pb.DTYPE_INT64, np.array(tokens[1:], "<i8").tobytes()
    return message.SerializeToString()


def send_binary(served, body: bytes, **headers: str):
    headers = {"Content-Type": "application/x-protobuf", **headers}
    return served.post("forward_backward", content=body, headers=headers)


def trainer(service: tinker.ServiceClient, **options: object) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, **options).result(timeout=20)


def test_fact_1_a_forward_only_pass_is_forward_backward_with_a_flag_and_leaves_no_gradient(service):
    client = trainer(service)
    passed = client.forward([example([1, 2, 3])], "cross_entropy").result(timeout=20)
    assert len(passed.loss_fn_outputs) == 1
    with pytest.raises(tinker.RequestFailedError):
        client.optim_step(ADAM).result(timeout=20)


def test_fact_2_passes_and_samples_come_back_binary_and_everything_else_as_json(served):
    model_id = served.model()
    passed = served.finished(send_binary(served, binary(model_id, 1, [1, 2, 3])))
    assert passed.headers["content-type"] == "application/x-protobuf"
    assert sdk_pb.ForwardBackwardOutput.FromString(passed.content).metrics["loss:sum"] != 0
    stepped = served.finished(
        served.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    )
    assert stepped.headers["content-type"] == "application/json"
    assert "metrics" in stepped.json()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_fact_3_a_sample_promises_one_sequence_id_for_each_sample(service, num_samples):
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=20)
    answer = sampler.sample(
        types.ModelInput.from_ints([1, 2]), num_samples, types.SamplingParams(max_tokens=3, seed=1)
    ).result(timeout=20)
    assert len({sequence.sequence_id for sequence in answer.sequences}) == num_samples


def test_fact_4_model_ids_are_what_the_sdk_builds_by_itself(served, service):
    client = trainer(service)
    saved = client.save_state("one").result(timeout=20)
    session_id = saved.path.removeprefix("tinker://").split(":train:")[0]
    assert saved.path == f"tinker://{session_id}:train:0/weights/one"
    restored = service.create_training_client_from_state(saved.path).result(timeout=20)
    assert restored.get_info().model_id == f"{session_id}:train:1"
    assert served.post("get_info", {"model_id": f"{session_id}:train:1"}).status_code == 200


def test_fact_5_numbers_decide_the_order_whatever_the_order_of_arrival(fussy):
    model_id = fussy.model()
    step = fussy.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    waiting = fussy.retrieve(step.json()["request_id"])
    assert waiting.status_code == 408
    assert waiting.json()["queue_state"] == "active"
    send_binary(fussy, binary(model_id, 1, [1, 2, 3]))
    assert "metrics" in fussy.finished(step).json()


def test_fact_5_the_chunks_of_a_big_batch_come_back_in_order(service):
    client = trainer(service)
    lengths = [2 + i % 7 for i in range(1500)]
    batch = [example(list(range(1, length + 2))) for length in lengths]
    passed = client.forward_backward(batch, "cross_entropy").result(timeout=30)
    assert [output["logprobs"].shape for output in passed.loss_fn_outputs] == [[n] for n in lengths]
    assert passed.metrics["datums:sum"] == 1500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}),
        ("optim_step", {"adam_params": {"learning_rate": "much"}}),
        ("save_weights", {"path": "a/b"}),
        ("load_weights", {"path": "tinker://nowhere", "optimizer": True}),
    ],
)
def test_fact_6_a_request_that_is_refused_uses_up_its_number(served, path, body):
    model_id = served.model()
    refused = served.post(path, {"model_id": model_id, "seq_id": 1, **body})
    assert refused.status_code == 400
    assert refused.json()["detail"]
    assert served.finished(send_binary(served, binary(model_id, 2, [1, 2, 3]))).status_code == 200


def test_fact_6_a_damaged_binary_body_uses_up_its_number_too(served):
    model_id = served.model()
    damaged = binary(model_id, 1, [1, 2, 3])[:-3] + b"\xff\xff\xff"
    assert send_binary(served, damaged).status_code == 400
    assert served.finished(send_binary(served, binary(model_id, 2, [1, 2, 3]))).status_code == 200


def test_fact_7_a_retry_gets_the_same_id_and_runs_once(served):
    model_id = served.model()
    body = binary(model_id, 1, [1, 2, 3])
    first, again = send_binary(served, body), send_binary(served, body)
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json()["request_id"] == again.json()["request_id"]
    other = send_binary(served, binary(model_id, 1, [4, 5, 6]))
    assert other.status_code == 400
    assert served.finished(first).content == served.finished(again).content


def test_fact_8_metric_names_hold_one_colon_and_loss_sum_is_there(served):
    model_id = served.model()
    passed = served.finished(send_binary(served, binary(model_id, 1, [1, 2, 3])))
    metrics = sdk_pb.ForwardBackwardOutput.FromString(passed.content).metrics
    assert "loss:sum" in metrics
    assert all(name.count(":") == 1 for name in metrics)


def test_fact_8_a_custom_loss_runs_on_the_client(service):
    def loss(_, logprobs):
        total = -sum(one.sum() for one in logprobs)
        return total, {"mine": float(total.detach())}

    client = trainer(service)
    passed = client.forward_backward_custom([example([1, 2, 3])], loss).result(timeout=30)
    assert "mine" in passed.metrics
    client.optim_step(ADAM).result(timeout=20)


BAD = {
    "no json": ("create_model", {"content": b"{", "headers": {"Content-Type": "application/json"}}),
    "missing field": ("create_model", {"json": {"session_id": "x"}}),
    "no path": ("weights_info", {"json": {"tinker_path": "tinker://a/b"}}),
    "not binary": (
        "forward_backward",
        {"content": b"\xff" * 9, "headers": {"Content-Type": "application/x-protobuf"}},
    ),
    "not zstd": (
        "forward_backward",
        {
            "content": b"abc",
            "headers": {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"},
        },
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_fact_9_every_refusal_has_a_body_and_states_its_length(served, case):
    path, options = BAD[case]
    refused = served.post(path, **options)
    assert refused.status_code == 400
    assert int(refused.headers["content-length"]) == len(refused.content) > 0
    assert isinstance(refused.json()["detail"], str)


def test_fact_9_a_failed_future_is_answered_with_200_and_a_category(served):
    model_id = served.model()
    failed = served.finished(send_binary(served, binary(model_id, 1, [1, 2, 3], "nonsense")))
    assert failed.status_code == 200
    assert failed.json()["category"] == "user"
    assert "cross_entropy" in failed.json()["error"]


def test_fact_10_samples_include_the_stop_token_with_a_logprob_for_every_token(service):
    sampler = service.create_sampling_client(base_model="tiny").result(timeout=20)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    free = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=8, temperature=0, stop=[])
    ).result(timeout=20)
    stop = free.sequences[0].tokens[2]
    stopped = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=8, temperature=0, stop=[stop])
    ).result(timeout=20)
    sequence = stopped.sequences[0]
    assert sequence.stop_reason == "stop"
    assert sequence.tokens == free.sequences[0].tokens[: sequence.tokens.index(stop) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)
