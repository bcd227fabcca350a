"""Section sample: many sequences as one request and as many, one token, and publishing in a loop."""

from __future__ import annotations

import time
from typing import Any

import tinker
from tinker import types

from load.context import Load
from load.measure import summary, tree_memory


def run(load: Load) -> dict[str, Any]:
    """Measure."""
    client = load.main
    sampler, seconds = load.publish(client)
    prompt = types.ModelInput.from_ints(
        [load.rng.randrange(load.settings.vocab) for _ in range(16)]
    )
    report: dict[str, Any] = {"save_weights_and_get_sampling_client_s": round(seconds, 3)}
    report |= _one_request(load, sampler, prompt)
    report |= _many_requests(load, sampler, prompt)
    report["one_token_call"] = summary(_one_token(load, sampler, prompt))
    # Publish and sample, as a loop of reinforcement learning does at every step.
    times: list[float] = []
    for index in range(5):
        load.steps(client, [load.datum(load.settings.seq, seed=index)], 1)
        times.append(load.publish(client)[1])
    report["publish_in_loop"] = summary(times)
    report["mem"] = tree_memory(load.settings.server_pid)
    return report


def _ask(load: Load, sampler: tinker.SamplingClient, prompt: Any, **options: Any) -> Any:
    """A future of `num_samples` sequences (default 1) of `tokens` tokens (default the settings')."""
    return sampler.sample(
        prompt=prompt,
        num_samples=options.get("num_samples", 1),
        sampling_params=types.SamplingParams(
            max_tokens=options.get("tokens", load.settings.sample_tokens),
            temperature=1.0,
            seed=options["seed"],
        ),
    )


def _count(response: types.SampleResponse) -> int:
    return sum(len(sequence.tokens) for sequence in response.sequences)


def _one_request(load: Load, sampler: tinker.SamplingClient, prompt: Any) -> dict[str, Any]:
    samples = load.settings.samples
    started = time.perf_counter()
    load.wait(_ask(load, sampler, prompt, num_samples=samples, seed=1))
    first_s = time.perf_counter() - started
    started = time.perf_counter()
    tokens = sum(
        _count(load.wait(_ask(load, sampler, prompt, num_samples=samples, seed=10 + index)))
        for index in range(3)
    )
    wall_s = time.perf_counter() - started
    return {
        "first_call_s": round(first_s, 3),
        "one_request_num_samples": {
            "tokens": tokens,
            "tokens_per_s": round(tokens / wall_s, 1),
            "s_per_request": round(wall_s / 3, 3),
        },
    }


def _many_requests(load: Load, sampler: tinker.SamplingClient, prompt: Any) -> dict[str, Any]:
    samples, tokens, wall_s = load.settings.samples, 0, 0.0
    for offset in (0, 100):  # the first round warms the shape up
        started = time.perf_counter()
        futures = [_ask(load, sampler, prompt, seed=offset + index) for index in range(samples)]
        tokens = sum(_count(load.wait(future)) for future in futures)
        wall_s = time.perf_counter() - started
    return {
        "many_requests": {
            "requests": samples,
            "tokens": tokens,
            "tokens_per_s": round(tokens / wall_s, 1),
            "wall_s": round(wall_s, 3),
        }
    }


def _one_token(load: Load, sampler: tinker.SamplingClient, prompt: Any) -> list[float]:
    load.wait(_ask(load, sampler, prompt, seed=1, tokens=1))
    times: list[float] = []
    for index in range(10):
        started = time.perf_counter()
        load.wait(_ask(load, sampler, prompt, seed=index, tokens=1))
        times.append(time.perf_counter() - started)
    return times
