"""10,000 mutated protobuf bodies against `lilo serve tiny`: no 5xx, no crash, no hang."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
from _proof import Proof, connect, datum, step, tiny_server, tokens

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.conformance.mutations import good_pass, mutated

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
LIMIT_S = 10.0
"""For one answer; the machine may be busy."""
HEADERS = {"Content-Type": "application/x-protobuf"}


def main() -> None:
    """One model, since a refused number is used up and the next body takes any number it likes."""
    proof = Proof("mutations")
    rng = random.Random(0)
    answers: Counter[int] = Counter()
    slowest = 0.0
    with tiny_server() as server, connect(server) as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        model_id = client.get_info().model_id
        headers = {**HEADERS, "X-API-Key": server.api_key}
        with httpx.Client(base_url=server.base_url, headers=headers, timeout=60) as http:
            for _ in range(COUNT):
                body = mutated(good_pass(model_id, rng.randint(1, 20), rng), rng)
                began = time.perf_counter()
                answer = http.post("/api/v1/forward_backward", content=body)
                slowest = max(slowest, time.perf_counter() - began)
                answers[answer.status_code] += 1
        proof.equal("answers", sum(answers.values()), COUNT)
        proof.equal("5xx", sum(n for status, n in answers.items() if status >= 500), 0)
        proof.figure("by status", dict(sorted(answers.items())), "told", True)
        proof.at_most("slowest answer, s", slowest, LIMIT_S)
        with proof.part("the server goes on"):
            other = service.create_lora_training_client("tiny", rank=4).result()
            loss = step(other, [datum(tokens(1, 12))])
            proof.figure("a new client's loss", loss, "above 0", loss > 0)
    proof.end()


if __name__ == "__main__":
    main()
