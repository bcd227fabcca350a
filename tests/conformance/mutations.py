"""Bodies that no client would send: good ones with bytes flipped, cut out, repeated or put in; the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
from tinker.proto import tinker_public_pb2 as sdk_pb

EDGES = (b"\x00", b"\xff", b"\x80" * 9, b"\xff" * 10 + b"\x01", b"\x08", b"\x7f")
VALUES = (None, True, -1, 0, 2**31, 2**63, 1.5, 1e308, "", "x", [], {}, [None], "\ud800")


def good_pass(model_id: str, seq_id: int, rng: random.Random) -> bytes:
    """A pass that would run, with most of what a body can hold."""
    message = sdk_pb.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        loss_fn=rng.choice(("cross_entropy", "ppo")),
        forward_only=rng.random() < 0.2,
    )
    for _ in range(rng.randint(1, 3)):
        length = rng.randint(1, 6)
        datum = message.data.add()
        ids = np.array([rng.randrange(200) for _ in range(length)])
        datum.model_input.add().encoded_text.tokens = ids.astype("<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = sdk_pb.DTYPE_INT64, ids.astype("<i8").tobytes()
        if message.loss_fn == "ppo":
            _add_floats(datum.loss_fn_inputs["logprobs"], length)
            _add_floats(datum.loss_fn_inputs["advantages"], length)
        elif rng.random() < 0.5:
            targets.shape.append(length)
            _add_floats(datum.loss_fn_inputs["weights"], length)
        else:
            targets.shape.extend([length, 1])
            weights = datum.loss_fn_inputs["weights"]
            weights.dtype = sdk_pb.DTYPE_FLOAT32
            weights.shape.extend([length, 1])
            weights.sparse_csr.values = np.ones(1, "<f4").tobytes()
            weights.sparse_csr.crow_indices = np.array([0] + [1] * length, "<i8").tobytes()
            weights.sparse_csr.col_indices = np.array([0], "<i8").tobytes()
    if message.loss_fn == "ppo":
        message.loss_fn_config_v2["clip_low_threshold"].number = 0.5 + rng.random() / 2
        message.loss_fn_config["clip_high_threshold"] = 1.5
    return message.SerializeToString()


def _add_floats(tensor: sdk_pb.Tensor, length: int) -> None:
    tensor.dtype, tensor.dense = sdk_pb.DTYPE_FLOAT32, np.full(length, 0.5, "<f4").tobytes()


def mutated(body: bytes, rng: random.Random) -> bytes:
    """One to four changes of bytes."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = rng.choice(EDGES)
            case _:
                data[at:at] = data[at : at + rng.randint(1, 16)]
    return bytes(data)


def mutated_json(body: dict[str, object], rng: random.Random) -> bytes:
    """One value somewhere in the body is another one, or its text is mutated like any bytes."""
    if rng.random() < 0.3:
        return mutated(json.dumps(body).encode(), rng)
    copy = json.loads(json.dumps(body))
    places = list(_places(copy))
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(copy).encode()


def _places(value: object) -> Iterator[tuple[object, object]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
