"""10,000 mutated protobuf bodies, each with a number of its own, against `lilo serve tiny`: no 5xx, no crash, no hang.

After each body a good pass is sent under the same number, so that no number is left out whatever became of the body: what
was read far enough to be refused or taken has its number, and the good pass is refused; else the good pass takes it. At
the end every future must have ended. Then one request of 20,000 data, during which heartbeats are timed; and schemathesis
sends what it makes of the description of the API, good and bad, in any order.
"""

from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from _proof import Proof, connect, datum, step, tiny_server, tokens
from tinker.proto import tinker_public_pb2 as sdk_pb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.conformance.mutations import good_pass, mutated

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
LIMIT_S = 10.0
"""For one answer; the machine may be busy."""
FUTURES_LIMIT_S = 120.0
"""For the last future to end, after the last body."""
MANY = 20_000
STALL_LIMIT_S = 0.25
"""For a heartbeat beside a large request."""
EXAMPLES = max(5, COUNT // 200)
"""That schemathesis makes for each call."""
PASS = {"Content-Type": "application/x-protobuf"}


def main() -> None:
    """One model for all bodies; then a new one, whose client must notice nothing."""
    proof = Proof("mutations")
    with tiny_server() as server, connect(server) as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        model_id = client.get_info().model_id
        headers = {"X-API-Key": server.api_key}
        with httpx.Client(base_url=server.base_url, headers=headers, timeout=60) as http:
            taken = mutated_bodies(proof, http, model_id)
            futures(proof, http, taken)
            with proof.part("the server goes on"):
                other = service.create_lora_training_client("tiny", rank=4).result()
                loss = step(other, [datum(tokens(1, 12))])
                proof.figure("a new client's loss", loss, "above 0", loss > 0)
            with proof.part("20,000 data in one request"):
                many_data(proof, http, other.get_info().model_id)
            described(proof, server.base_url, server.api_key)
    proof.end()


def mutated_bodies(proof: Proof, http: httpx.Client, model_id: str) -> list[str]:
    """Send them; the request ids of what was taken."""
    rng = random.Random(0)
    answers, fillers = Counter[int](), Counter[int]()
    taken: list[str] = []
    slowest, waits = 0.0, 0
    for seq_id in range(1, COUNT + 1):
        good = good_pass(model_id, seq_id, rng)
        body = mutated(good, rng)
        for content, counts in ((body, answers), (good, fillers)):
            began = time.perf_counter()
            answer = http.post("/api/v1/forward_backward", content=content, headers=PASS)
            slowest = max(slowest, time.perf_counter() - began)
            while answer.status_code == 429:
                # A full queue, which is said of what was not looked at: sent again, as the SDK does.
                waits += 1
                time.sleep(0.1)
                answer = http.post("/api/v1/forward_backward", content=content, headers=PASS)
            counts[answer.status_code] += 1
            if answer.status_code == 200:
                taken.append(answer.json()["request_id"])
    proof.equal("mutated bodies, answered", sum(answers.values()), COUNT)
    total = answers + fillers
    proof.equal("5xx", sum(n for status, n in total.items() if status >= 500), 0)
    proof.figure("mutated bodies by status", dict(sorted(answers.items())), "told", True)
    proof.figure("good passes behind them by status", dict(sorted(fillers.items())), "told", True)
    proof.figure("times that the queue was full", waits, "told", True)
    proof.at_least("mutated bodies that were taken", answers[200], COUNT // 50)
    proof.at_most("slowest answer, s", slowest, LIMIT_S)
    return taken


def futures(proof: Proof, http: httpx.Client, taken: list[str]) -> None:
    """Every number up to the last has a future, and every future ends."""
    deadline = time.monotonic() + FUTURES_LIMIT_S
    ends = Counter[str]()
    for request_id in dict.fromkeys(taken):
        ends[end_of(http, request_id, deadline)] += 1
    proof.figure("futures by end", dict(sorted(ends.items())), "told", True)
    proof.equal("futures that did not end", ends["waiting"], 0)
    proof.at_least("futures with a result", ends["result"], COUNT // 10)


def end_of(http: httpx.Client, request_id: str, deadline: float) -> str:
    """How a future ended; `waiting` if it had not by the deadline, which one behind an unused number never does."""
    number = int(request_id.rpartition(":")[2])
    if number > COUNT:
        return "behind a number that no body had"
    body = {"request_id": request_id}
    while time.monotonic() < deadline:
        answer = http.post(
            "/api/v1/retrieve_future", json=body, headers={"Accept": "application/x-protobuf"}
        )
        if answer.status_code == 410:
            return "made room for later ones"
        if answer.status_code != 408:
            binary = answer.headers["content-type"] == PASS["Content-Type"]
            return "result" if binary else "failed"
    return "waiting"


def many_data(proof: Proof, http: httpx.Client, model_id: str) -> None:
    """One request of very many data; heartbeats beside it are answered as if it were not there."""
    message = sdk_pb.ForwardBackwardRequest(model_id=model_id, seq_id=3, loss_fn="cross_entropy")
    for _ in range(MANY):
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
        targets = one.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = sdk_pb.DTYPE_INT64, np.array([2], "<i8").tobytes()
    content = message.SerializeToString()
    # What this process collects meanwhile would be taken for the server's.
    gc.collect()
    gc.freeze()
    with beats(http, model_id.split(":")[0]) as alone:
        time.sleep(5)
    proof.figure("slowest heartbeat without it, s", max(alone), "told", True)
    with beats(http, model_id.split(":")[0]) as took:
        answer = http.post("/api/v1/forward_backward", content=content, headers=PASS)
        ended = end_of(http, answer.json()["request_id"], time.monotonic() + FUTURES_LIMIT_S)
    proof.equal(f"{MANY:,} data in one request", ended, "result")
    proof.figure("heartbeats beside it", len(took), "told", bool(took))
    proof.at_most("slowest heartbeat beside it, s", max(took), STALL_LIMIT_S)


def described(proof: Proof, base_url: str, api_key: str) -> None:
    """Schemathesis against the description that the server gives of itself."""
    program = str(Path(sys.executable).parent / "schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [program, "run", f"{base_url}/api/v1/openapi.json", "--checks", checks]
    command += ["--header", f"X-API-Key: {api_key}", "--phases", "examples,coverage,fuzzing"]
    # The one call that waits for something that never comes would do so each time.
    command += ["--exclude-path", "/api/v1/retrieve_futures", "--no-color"]
    command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--generation-database", "none"]
    # It leaves notes where it runs.
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False
        )
    cases = re.search(r"(\d+) generated", done.stdout)
    found = re.findall(r"^(.*) failures?\b", done.stdout, re.M)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    proof.figure("schemathesis, cases", int(cases[1]) if cases else 0, "> 0", bool(cases))
    proof.equal("schemathesis, exit code", done.returncode, 0)
    proof.equal("schemathesis, failures", len(found) if done.returncode else 0, 0)


@contextmanager
def beats(http: httpx.Client, session_id: str) -> Iterator[list[float]]:
    """Heartbeats one after another while the context lasts; how long each took, for ever if it was not good."""
    took: list[float] = []
    over = threading.Event()

    def beat() -> None:
        with httpx.Client(base_url=http.base_url, headers=http.headers, timeout=60) as own:
            while not over.wait(0.01):
                began = time.perf_counter()
                answer = own.post("/api/v1/session_heartbeat", json={"session_id": session_id})
                seconds = time.perf_counter() - began
                took.append(seconds if answer.status_code == 200 else float("inf"))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
