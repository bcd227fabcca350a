"""Bad input of every kind is a 4xx or a failed future with a sentence, in under 2 s, and the client goes on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import tinker
import zstandard
from _proof import Proof, adam, connect, datum, logprobs, outcome, tiny_server, tokens
from lilo_engine.demo.server import LocalServer
from tinker import types
from tinker.types.optimizer import DimuonOptimizerConfig

LIMIT_S = 2.0
GOOD = datum(tokens(1, 12))
GIB = 1 << 30


def main() -> None:
    """One server for everything that a request can do wrong; then the ways in which a server cannot start."""
    proof = Proof("badinput")
    with tiny_server() as server:
        with connect(server) as service:
            client = service.create_lora_training_client("tiny", rank=8, seed=1).result()
            for name, call, words in sdk_cases(service, client):
                with proof.part(name):
                    error, seconds = outcome(call)
                    judge(proof, name, error, seconds, words)
                    rows = logprobs(client, [GOOD])
                    proof.equal(f"{name}: the client goes on", len(rows[0]), 11)
            with proof.part("wrong key"):
                stranger = tinker.ServiceClient(base_url=server.base_url, api_key="tml-wrong")
                error, seconds = outcome(lambda: stranger.create_lora_training_client("tiny"))
                judge(proof, "wrong key", error, seconds, ("key",))
        raw_cases(proof, server)
        start_cases(proof, server)
    proof.end()


def judge(
    proof: Proof, name: str, error: str | None, seconds: float, words: tuple[str, ...]
) -> None:
    """The error is there, soon, and speaks of the matter."""
    said = None if error is None else error[:300]
    good = error is not None and all(word.lower() in error.lower() for word in words)
    good = good and "Traceback" not in (error or "")
    proof.figure(f"{name}: what is said", said, f"an error with {', '.join(words)}", good)
    proof.at_most(f"{name}: seconds", round(seconds, 3), LIMIT_S)


def broken(ids: list[int], targets: list[int], weights: list[float]) -> types.Datum:
    """A datum whose parts need not fit."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )


Case = tuple[str, Callable[[], Any], tuple[str, ...]]


def sdk_cases(service: tinker.ServiceClient, client: tinker.TrainingClient) -> list[Case]:
    """What the SDK lets through: name, call, words that the error must have."""

    def train(data: list[types.Datum], loss: str = "cross_entropy") -> Callable[[], Any]:
        return lambda: client.forward_backward(data, loss)  # type: ignore[arg-type]

    def create(model: str = "tiny", **options: Any) -> Callable[[], Any]:
        return lambda: service.create_lora_training_client(model, **options)

    nan = float("nan")
    return [
        ("token id out of range", train([broken([1, 2, 260], [2, 3, 4], [1.0] * 3)]), ("260",)),
        ("negative token id", train([broken([1, -2, 3], [2, 3, 4], [1.0] * 3)]), ("-2",)),
        ("target out of range", train([broken([1, 2, 3], [2, 3, 99_999], [1.0] * 3)]), ("99999",)),
        ("empty datum", train([broken([], [], [])]), ("empty",)),
        ("targets too short", train([broken([1, 2, 3], [2], [1.0])]), ("target_tokens",)),
        ("weights too short", train([broken([1, 2, 3], [2, 3, 4], [1.0])]), ("weights",)),
        ("NaN weight", train([broken([1, 2, 3], [2, 3, 4], [1.0, nan, 1.0])]), ("weights",)),
        ("input over the context", train([datum(tokens(2, 1100))]), ("1024",)),
        ("unknown loss", train([GOOD], "cross_entropie"), ("cross_entropie", "cross_entropy")),
        ("loss inputs missing", train([GOOD], "importance_sampling"), ("logprobs",)),
        ("step without gradients", lambda: client.optim_step(adam()), ("gradient",)),
        ("unknown model", create("tiny-er"), ("tiny-er", "tiny")),
        ("rank 0", create(rank=0), ("rank",)),
        ("rank above the maximum", create(rank=33), ("33", "32")),
        ("dimuon", create(optimizer=DimuonOptimizerConfig()), ("dimuon",)),
        (
            "malformed path, training",
            lambda: service.create_training_client_from_state("tinker://nonsense"),
            ("tinker://",),
        ),
        (
            "malformed path, sampling",
            lambda: service.create_sampling_client(model_path="tinker://a/b/c/d"),
            ("tinker://",),
        ),
        (
            "checkpoint that is not there",
            lambda: service.create_training_client_from_state("tinker://nobody:train:0/weights/x"),
            ("nobody",),
        ),
        ("bad checkpoint name", lambda: client.save_state("../../escape"), ("name",)),
    ]


def raw_cases(proof: Proof, server: LocalServer) -> None:
    """What the SDK would never send."""
    head = {"X-API-Key": server.api_key}
    with httpx.Client(base_url=f"{server.base_url}/api/v1", headers=head, timeout=30.0) as http:

        def post(path: str, **options: Any) -> tuple[str | None, float]:
            answer: list[httpx.Response] = []

            def call() -> None:
                answer.append(http.post(path, **options))
                if answer[0].status_code >= 400:
                    raise ValueError(f"{answer[0].status_code} {answer[0].text}")

            error, seconds = outcome(call)
            if answer and not 400 <= answer[0].status_code < 500:
                error = None
            return error, seconds

        session = http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()
        model = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
        flags = {"train_attn": False, "train_mlp": False, "train_unembed": False}
        error, seconds = _final(http, "/create_model", model | {"lora_config": {"rank": 8} | flags})
        judge(proof, "all train flags off", error, seconds, ("train_",))
        text = {"content": b"{this is not JSON", "headers": {"Content-Type": "application/json"}}
        judge(proof, "JSON that is not JSON", *post("/create_session", **text), ("JSON",))
        binary = {"Content-Type": "application/x-protobuf"}
        packed = binary | {"Content-Encoding": "zstd"}
        for name, size in (("that says so", GIB), ("that does not say so", -1)):
            answer = post("/forward_backward", content=_bomb(size), headers=packed)
            judge(proof, f"zstd bomb of 1 GiB {name}", *answer, ("bytes",))
        answer = post("/forward_backward", content=b"\xff" * 64, headers=binary)
        judge(proof, "protobuf that is not protobuf", *answer, ("message",))
        _reused_number(proof, http, post, model | {"model_seq_id": 1})


def _reused_number(
    proof: Proof,
    http: httpx.Client,
    post: Callable[..., tuple[str | None, float]],
    model: dict[str, Any],
) -> None:
    """A number that comes again with another payload is refused; with the same one it is the same request."""
    error, _ = _final(http, "/create_model", model | {"lora_config": {"rank": 8}})
    proof.equal("a model of our own", error, None)
    model_id = f"{model['session_id']}:train:{model['model_seq_id']}"
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    first = http.post("/optim_step", json=body).json()
    again = http.post("/optim_step", json=body).json()
    proof.equal(
        "the same number and payload: same request", again["request_id"], first["request_id"]
    )
    other = body | {"adam_params": {"learning_rate": 0.2}}
    judge(proof, "number reused with another payload", *post("/optim_step", json=other), ("1",))


def _final(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str | None, float]:
    """Submit and wait for the future; the error, if any, and the seconds."""

    def call() -> None:
        answer = http.post(path, json=body)
        if answer.status_code >= 400:
            raise ValueError(f"{answer.status_code} {answer.text}")
        request = {"request_id": answer.json()["request_id"], "allow_metadata_only": False}
        result = http.post("/retrieve_future", json=request)
        for _ in range(3):
            if result.status_code != 408:
                break
            result = http.post("/retrieve_future", json=request)
        if result.status_code >= 400 or "error" in result.json():
            raise ValueError(f"{result.status_code} {result.text}")

    return outcome(call)


def _bomb(stated_size: int) -> bytes:
    """1 GiB of zeros in some tens of KiB; -1 leaves the size out of its header."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=stated_size)
    block = bytes(1 << 20)
    return (
        b"".join([compressor.compress(block) for _ in range(GIB // len(block))])
        + compressor.flush()
    )


def start_cases(proof: Proof, server: LocalServer) -> None:
    """A server that cannot start says why in one line and exits with a code that is not 0."""
    port = server.base_url.rsplit(":", 1)[1].strip("/")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a-file"
        file.write_text("not a folder")
        cases: list[tuple[str, list[str], str]] = [
            ("port in use", ["tiny", "--port", port, "--data-dir", folder], port),
            (
                "data folder cannot be written",
                ["tiny", "--data-dir", str(file / "below")],
                "a-file",
            ),
            ("unknown definition", ["tinny", "--data-dir", folder], "tiny"),
            (
                "second server on one data folder",
                ["tiny", "--port", "0", "--data-dir", str(server.data_dir)],
                str(server.data_dir),
            ),
        ]
        for name, arguments, word in cases:
            with proof.part(name):
                command = [
                    sys.executable,
                    "-c",
                    "from lilo_engine.cli import main; main()",
                    "serve",
                ]
                done = subprocess.run(
                    [*command, *arguments],
                    capture_output=True,
                    text=True,
                    timeout=60.0,
                    check=False,
                )
                lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
                good = len(lines) == 1 and word in lines[0]
                proof.figure(f"{name}: what is said", lines[-3:], f"one line with {word}", good)
                proof.figure(f"{name}: exit code", done.returncode, "not 0", done.returncode != 0)


if __name__ == "__main__":
    main()
