"""Bad input: each is refused, or fails, in words and within two seconds, and the same client goes on working."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
import zstandard
from lilo_definitions import get
from tinker.proto import tinker_public_pb2 as sdk_pb

from tests.conformance.test_ten_facts import binary, send_binary

LIMIT_S = 20.0
"""Less than a poll waits for a result (25 s): what is refused is not waited for."""


def datum(message: sdk_pb.ForwardBackwardRequest, tokens: list[int], **inputs: list[float]) -> None:
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, values in inputs.items():
        tensor = one.loss_fn_inputs[name]
        if name == "target_tokens":
            tensor.dtype, tensor.dense = sdk_pb.DTYPE_INT64, np.array(values, "<i8").tobytes()
        else:
            tensor.dtype, tensor.dense = sdk_pb.DTYPE_FLOAT32, np.array(values, "<f4").tobytes()


def request(model_id: str, loss: str = "cross_entropy") -> sdk_pb.ForwardBackwardRequest:
    return sdk_pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn=loss)


def token_out_of_range(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1, 99999], target_tokens=[1, 2])


def target_out_of_range(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1, 2], target_tokens=[1, -5])


def empty_datum(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [], target_tokens=[])


def no_data(message: sdk_pb.ForwardBackwardRequest) -> None:
    del message.data[:]


def wrong_lengths(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1, 2, 3], target_tokens=[1, 2])


def nan_weight(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1, 2], target_tokens=[1, 2], weights=[1.0, float("nan")])


def unknown_loss(message: sdk_pb.ForwardBackwardRequest) -> None:
    message.loss_fn = "cross_entrophy"
    datum(message, [1, 2], target_tokens=[1, 2])


def too_long(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1] * 5000, target_tokens=[1] * 5000)


def an_image(message: sdk_pb.ForwardBackwardRequest) -> None:
    message.data.add().model_input.add().image.data = b"png"


def half_a_token(message: sdk_pb.ForwardBackwardRequest) -> None:
    message.data.add().model_input.add().encoded_text.tokens = b"123"


def shape_that_lies(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1, 2], target_tokens=[1, 2])
    message.data[0].loss_fn_inputs["target_tokens"].shape.extend([3, 3])


def huge_sparse(message: sdk_pb.ForwardBackwardRequest) -> None:
    datum(message, [1, 2], target_tokens=[1, 2])
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.sparse_csr.crow_indices = b""
    tensor.shape.extend([1 << 40, 1 << 20])


@pytest.mark.parametrize(
    "spoil",
    [
        token_out_of_range,
        target_out_of_range,
        empty_datum,
        no_data,
        wrong_lengths,
        nan_weight,
        unknown_loss,
        too_long,
        an_image,
        half_a_token,
        shape_that_lies,
        huge_sparse,
    ],
)
def test_a_bad_pass_fails_in_words_and_the_client_goes_on(served, spoil):
    model_id = served.model()
    message = request(model_id)
    spoil(message)
    began = time.monotonic()
    submitted = send_binary(served, message.SerializeToString())
    if submitted.status_code == 200:
        failed = served.finished(submitted).json()
        assert failed["category"] == "user"
        assert failed["error"]
    else:
        assert submitted.status_code == 400
        assert submitted.json()["detail"]
    assert time.monotonic() - began < LIMIT_S
    after = served.finished(send_binary(served, binary(model_id, 2, [1, 2, 3])))
    assert after.headers["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model": "nobody/nothing"},
        {"lora_config": {"rank": 0}},
        {"lora_config": {"rank": 33}},
        {"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}},
        {"optimizer_config": {"type": "dimuon", "version": 1}},
        {"session_id": "nobody"},
        {"model_seq_id": -1},
    ],
)
def test_a_model_that_cannot_be_is_refused_and_the_session_goes_on(served, changes):
    session_id = served.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", **changes}
    began = time.monotonic()
    refused = served.post("create_model", body)
    assert 400 <= refused.status_code < 500
    assert refused.json()["detail"]
    assert time.monotonic() - began < LIMIT_S
    assert served.model(session_id, 1) == f"{session_id}:train:1"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("nonsense", 400),
        ("tinker://run/weights", 400),
        ("tinker://run/external_weights/x", 400),
        ("tinker://run/sampler_weights/x", 400),
        ("tinker://run/weights/none", 404),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_when_a_model_is_made_from_it(served, path, status):
    body = {"session_id": served.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    refused = served.post("load_weights", body)
    assert refused.status_code == status
    assert refused.json()["detail"]


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "unstated"])
def test_a_zstd_bomb_of_a_gibibyte_is_refused_without_being_unpacked(served, stated):
    compressor = zstandard.ZstdCompressor(write_content_size=stated).compressobj(
        size=1 << 30 if stated else -1
    )
    zeros = bytes(1 << 24)
    bomb = b"".join([*(compressor.compress(zeros) for _ in range(64)), compressor.flush()])
    assert len(bomb) < 1 << 20
    began = time.monotonic()
    refused = send_binary(served, bomb, **{"Content-Encoding": "zstd"})
    assert refused.status_code == 413
    assert refused.json()["detail"]
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-protobuf", "Content-Encoding": "br"}, 415),
    ],
)
def test_a_medium_that_is_not_spoken_is_415(served, headers, status):
    refused = served.post("forward_backward", content=b"x", headers=headers)
    assert refused.status_code == status
    assert refused.json()["detail"]


def test_a_compressed_pass_equals_the_plain_one(served):
    model_id = served.model()
    body = binary(model_id, 1, [1, 2, 3])
    plain = send_binary(served, body)
    packed = zstandard.ZstdCompressor().compress(body)
    again = send_binary(served, packed, **{"Content-Encoding": "zstd"})
    assert again.json()["request_id"] == plain.json()["request_id"]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [99999]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1 << 40]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 5000}]}},
        {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
        {"num_samples": 0},
        {"num_samples": 10**9},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"top_p": 0}},
        {"sampling_params": {"top_k": -7}},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"stop": ["text"]}},
        {"prompt_alt_tokens_k": -2},
        {"prompt_logprobs_last_n": 1},
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [9, 1]}},
        {"sampling_session_id": "nobody"},
    ],
)
def test_a_bad_sample_is_refused_and_the_sampler_goes_on(served, changes):
    good = {
        "sampling_session_id": served.sampler(),
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    began = time.monotonic()
    refused = served.post("asample", {**good, **changes})
    assert refused.status_code in (400, 404)
    assert refused.json()["detail"]
    assert time.monotonic() - began < LIMIT_S
    assert served.finished(served.post("asample", good)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "nothing", 404),
        ("PUT", "asample", 404),
        ("GET", "training_runs?limit=many", 422),
        ("GET", "training_runs/nobody:train:0", 404),
        ("DELETE", "training_runs/nobody:train:0/checkpoints/weights/x", 404),
        ("DELETE", "training_runs/nobody:train:0/checkpoints/odd/x", 400),
        ("GET", "samplers/nobody", 404),
        ("POST", "sessions/nobody/finish", 404),
    ],
)
def test_every_error_of_the_http_side_has_a_detail_in_words(served, method, path, status):
    answer = served.http.request(method, f"/api/v1/{path}")
    assert answer.status_code == status
    assert isinstance(answer.json()["detail"], str)
    assert int(answer.headers["content-length"]) > 0


def test_an_unknown_future_is_404(served):
    for request_id in ("nobody:train:0:1", "sample:nobody:1"):
        answer = served.retrieve(request_id)
        assert answer.status_code == 404
        assert answer.json()["detail"]


def test_an_unknown_model_is_404(served):
    refused = send_binary(served, binary("nobody:train:0", 1, [1, 2, 3]))
    assert refused.status_code == 404
    assert refused.json()["detail"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_pass_that_is_too_large_uses_up_its_number_too(fussy, packed):
    model_id = fussy.model()
    body, headers = binary(model_id, 1, [1] * (1 << 19)), {}
    if packed:
        body, headers = zstandard.ZstdCompressor().compress(body), {"Content-Encoding": "zstd"}
    assert send_binary(fussy, body, **headers).status_code == 413
    after = fussy.finished(send_binary(fussy, binary(model_id, 2, [1, 2, 3])))
    assert after.headers["content-type"] == "application/x-protobuf"


def test_a_refusal_that_finds_no_room_for_its_number_is_sent_again_like_any_request(served):
    def step(number: int, **changes: object):
        body = {"model_id": model_id, "seq_id": number, "adam_params": {}, **changes}
        return served.post("optim_step", body)

    model_id = served.model()
    room = get("tiny").limits.max_queued_operations
    for number in range(2, room + 2):
        assert step(number).status_code == 200
    bad, after = room + 2, room + 3
    full = step(bad, adam_params={"type": "dimuon"})
    assert (full.status_code, full.json()["kind"]) == (429, "saturated")
    served.finished(step(1))
    served.finished(step(room + 1))
    refused = step(bad, adam_params={"type": "dimuon"})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_request")
    assert "no gradients" in served.finished(step(after)).json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        {"user_metadata": {"note": "x" * 70_000}},
        {"user_metadata": {"note": ["x"] * 20_000}},
        {"display_name": "x" * 2000},
        {"project_id": "x" * 2000},
        {"tags": ["x" * 2000]},
        {"tags": ["x"] * 300},
    ],
    ids=lambda body: next(iter(body)),
)
def test_notes_that_are_no_notes_are_refused_by_their_name(served, body):
    refused = served.post("create_session", body)
    assert refused.status_code == 400
    assert next(iter(body)) in refused.json()["detail"]
    assert len(refused.text) < 1000


def test_a_checkpoint_with_too_many_notes_uses_up_its_number(served):
    model_id = served.model()
    save = {"model_id": model_id, "seq_id": 1, "path": "state"}
    assert served.post("save_weights", {**save, "user_metadata": {"a": "x" * 70_000}}).is_error
    kept = served.finished(served.post("save_weights", {**save, "seq_id": 2})).json()
    assert kept["path"].endswith("/weights/state")


def test_a_session_ends_however_much_its_client_says(served):
    session_id = served.session()
    said = {"reason": {"type": "errored"}, "detail": "x" * 1_000_000}
    assert served.post(f"sessions/{session_id}/finish", said).status_code == 200
    (found,) = served.post("sessions/search", {"session_id": session_id}).json()["sessions"]
    assert found["status"]["reason"] == {"type": "errored"}
    assert len(found["status"]["detail"]) == 4096
    session_id = served.session()
    said = {"reason": {"type": "x" * 1_000_000}, "detail": "two\nlines"}
    assert served.post(f"sessions/{session_id}/finish", said).status_code == 200
    (found,) = served.post("sessions/search", {"session_id": session_id}).json()["sessions"]
    assert len(str(found)) < 10_000
    session_id = served.session()
    said = {"reason": {"type": "interrupted"}, "detail": "two\nlines"}
    assert served.post(f"sessions/{session_id}/finish", said).status_code == 200
    (found,) = served.post("sessions/search", {"session_id": session_id}).json()["sessions"]
    assert found["status"]["reason"] == {"type": "interrupted"}


def test_json_that_nests_for_ever_is_refused(served):
    content = b'{"model_id": "m", "seq_id": 1, "x": ' + b"[" * 100_000
    headers = {"Content-Type": "application/json"}
    for path in ("optim_step", "create_session", "load_weights"):
        assert served.post(path, content=content, headers=headers).status_code == 400


def test_words_that_are_no_text_do_not_break_the_answer(served):
    content = b'{"session_id": "\\ud800"}'
    headers = {"Content-Type": "application/json"}
    refused = served.post("session_heartbeat", content=content, headers=headers)
    assert refused.status_code in (400, 404)
    assert refused.json()["detail"]


def test_half_a_surrogate_pair_in_a_model_id_is_bad_input_and_the_connection_stays(served):
    began = time.monotonic()
    for body in (b'{"model_id":"\\ud800","seq_id":1}', b'{"model_id":"\\ud83d","seq_id":true}'):
        for path in ("optim_step", "forward_backward", "save_weights"):
            refused = served.http.post(
                f"/api/v1/{path}", content=body, headers={"Content-Type": "application/json"}
            )
            assert refused.status_code == 400, refused.text
    assert time.monotonic() - began < LIMIT_S


def test_a_number_that_is_no_integer_is_refused_with_what_it_is(served):
    session_id = served.session()
    model_id = served.model(session_id)
    for seq_id in (True, "1", 1.0, 1.5, None, 2**31):
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}
        refused = served.post("optim_step", body)
        assert refused.status_code == 400
        assert f"seq_id is {json.dumps(seq_id)}" in refused.json()["detail"]
    served.post(f"sessions/{session_id}/finish", {})


@pytest.mark.parametrize("token", [-1, 260, 2**40])
def test_a_stop_token_that_cannot_be_drawn_is_refused(served, token):
    body = {
        "sampling_session_id": served.sampler(),
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [50]}]},
        "sampling_params": {"max_tokens": 4, "stop": [token]},
    }
    refused = served.post("asample", body)
    assert refused.status_code == 400
    assert str(token) in refused.json()["detail"]
    body["sampling_params"] = {"max_tokens": 4, "stop": [259]}
    assert served.post("asample", body).status_code == 200, "the number was not used up"


@pytest.mark.parametrize("ids_first", [True, False])
@pytest.mark.parametrize("stated", [True, False], ids=["with a length", "in chunks"])
@pytest.mark.parametrize("packed", [None, "small", "large"])
def test_a_json_body_that_is_too_large_uses_up_its_number_wherever_that_stands(
    fussy, ids_first, stated, packed
):
    model_id = fussy.model()
    inputs = {"target_tokens": {"data": [1] * 50, "dtype": "int64"}}
    chunk = {"type": "encoded_text", "tokens": [1] * 50}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}
    # What does not get smaller is too large before it is unpacked.
    noise = random.Random(0).randbytes(1 << 20).hex() if packed == "large" else ""
    data = {"forward_backward_input": {"data": [datum] * 3000, "loss_fn": noise}}
    ids = {"model_id": model_id, "seq_id": 1}
    content = json.dumps({**ids, **data} if ids_first else {**data, **ids}).encode()
    assert len(content) > 1 << 20
    headers = {"Content-Type": "application/json"}
    if packed is not None:
        content = zstandard.ZstdCompressor().compress(content)
        headers["Content-Encoding"] = "zstd"
        assert (len(content) > 1 << 20) == (packed == "large")
    pieces = [content[at : at + 50_000] for at in range(0, len(content), 50_000)]
    sent = fussy.post(
        "forward_backward", content=content if stated else iter(pieces), headers=headers
    )
    assert sent.status_code == 413
    taken = fussy.finished(send_binary(fussy, binary(model_id, 2, [1, 2, 3])))
    assert taken.headers["content-type"] == "application/x-protobuf"
    stepped = {"model_id": model_id, "seq_id": 3, "adam_params": {}}
    spoilt = fussy.finished(fussy.post("optim_step", stepped)).json()
    assert "number 1" in spoilt["error"], "a step uses no half of a batch"


HUGE = 10**40


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": [1e300]}, "float32"),
        ({"data": [HUGE]}, "float32"),
        ({"data": [1], "shape": [HUGE]}, "shape"),
        ({"data": [1], "shape": [-1, HUGE]}, "shape"),
        ({"sparse_crow_indices": [0, HUGE], "sparse_col_indices": [0], "shape": [1, 1]}, "int64"),
        ({"sparse_crow_indices": [0, 1], "sparse_col_indices": [-HUGE], "shape": [1, 1]}, "int64"),
        ({"sparse_crow_indices": [0, 1], "sparse_col_indices": [0], "shape": [HUGE, 1]}, "weights"),
    ],
)
def test_a_number_that_its_type_does_not_hold_is_refused_by_name(served, change, named):
    weights = {"data": [1.0], "dtype": "float32", **change}
    inputs = {"target_tokens": {"data": [1], "dtype": "int64"}, "weights": weights}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "loss_fn_inputs": inputs,
    }
    data = {"data": [datum], "loss_fn": "cross_entropy"}
    body = {"model_id": served.model(), "seq_id": 1, "forward_backward_input": data}
    refused = served.post("forward_backward", body)
    assert refused.status_code == 400, refused.text
    assert "weights" in refused.json()["detail"]
    assert named in refused.json()["detail"]
