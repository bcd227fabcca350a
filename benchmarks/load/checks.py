"""Section checks: eleven small truths that any server of the Tinker API must keep (needs about 20 adapter slots)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

from load.context import Load, largest_difference, log, values

RATE = 1e-2
"""A learning rate at which one step is seen clearly."""
GENTLE_RATE = 2e-3
"""For a loss that must fall: at `RATE` tiny, which finds random bytes very unlikely, jumps up now and then."""


def run(load: Load) -> dict[str, Any]:
    """Run the checks asked for; a check that raises has failed."""
    asked = load.settings.checks.split(",") if load.settings.checks else list(CHECKS)
    data = [load.datum(load.settings.seq, seed=50 + index) for index in range(4)]
    report: dict[str, Any] = {}
    for name in asked:
        started = time.perf_counter()
        try:
            verdict: dict[str, Any] = CHECKS[name](load, data)
        except Exception as error:  # one failed check must not hide the others
            verdict = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        verdict["s"] = round(time.perf_counter() - started, 2)
        report[name] = verdict
        log("check", name, verdict)
    report["passed"] = sum(1 for verdict in report.values() if verdict.get("ok"))
    report["of"] = len(asked)
    return report


def _twins(load: Load, data: list[types.Datum]) -> list[tinker.TrainingClient]:
    """Two clients with equal weights and optimizer, whatever the server does with seeds."""
    client = load.client()
    load.train(client, data, RATE)
    path = load.wait(client.save_state(f"twin{time.time_ns()}")).path
    return [load.restore(path), load.restore(path)]


def loss_falls(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Ten steps on four data lower their loss."""
    client = load.client()
    before = load.mean_loss(client, data)
    for _ in range(10):
        load.train(client, data, GENTLE_RATE)
    after = load.mean_loss(client, data)
    return {"before": before, "after": after, "ok": after < before - 0.05}


def grads_add(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Two calls and a step equal one call with both halves and a step."""
    split, whole = _twins(load, data)
    start = largest_difference(load.logprobs(split, data), load.logprobs(whole, data))
    for _ in range(2):
        futures = [
            split.forward_backward(data[:2], "cross_entropy"),
            split.forward_backward(data[2:], "cross_entropy"),
            split.optim_step(load.adam(RATE)),
            whole.forward_backward(data, "cross_entropy"),
            whole.optim_step(load.adam(RATE)),
        ]
        for future in futures:
            load.wait(future)
    end = largest_difference(load.logprobs(split, data), load.logprobs(whole, data))
    return {"start_diff": start, "max_abs_diff": end, "ok": end < 1e-3}


def order_kept(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Three steps sent without waiting equal the awaited run."""
    sent, awaited = _twins(load, data)
    futures: list[Any] = []
    for datum in data[:3]:
        futures.append(sent.forward_backward([datum], "cross_entropy"))
        futures.append(sent.optim_step(load.adam(RATE)))
    for future in futures:
        load.wait(future)
    for datum in data[:3]:
        load.train(awaited, [datum], RATE)
    worst = largest_difference(load.logprobs(sent, data), load.logprobs(awaited, data))
    return {"max_abs_diff": worst, "ok": worst < 1e-4}


def seed(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Equal seeds start equal, others do not: seen after one step, since B starts at zero."""
    rows: list[list[list[float]]] = []
    for value in (7, 7, 8):
        client = load.client(seed=value)
        load.train(client, data, RATE)
        rows.append(load.logprobs(client, data))
    same, other = largest_difference(rows[0], rows[1]), largest_difference(rows[0], rows[2])
    good = same < 1e-4 and other > 10 * max(same, 1e-7)
    return {"same_seed_diff": same, "other_seed_diff": other, "ok": good}


def resume_equals(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Resuming with the optimizer equals not stopping; resuming without it does not."""
    live = load.client()
    for datum in data:
        load.train(live, [datum], RATE)
    path = load.wait(live.save_state(f"resume{time.time_ns()}")).path
    clients = {
        "live": live,
        "warm": load.restore(path),
        "cold": load.service.create_training_client_from_state(path).result(),
    }
    rows: dict[str, list[list[float]]] = {}
    for name, client in clients.items():
        for datum in data[:2]:
            load.train(client, [datum], RATE)
        rows[name] = load.logprobs(client, data)
    warm = largest_difference(rows["live"], rows["warm"])
    cold = largest_difference(rows["live"], rows["cold"])
    good = warm < 1e-3 and cold > 10 * max(warm, 1e-6)
    return {"live_vs_warm": warm, "live_vs_cold": cold, "ok": good}


def isolation(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """One client's logprobs do not move while another trains hard."""
    still, moving = load.client(), load.client()
    before = load.logprobs(still, data)
    for _ in range(5):
        load.train(moving, data, 5 * RATE)
    worst = largest_difference(before, load.logprobs(still, data))
    return {"max_abs_diff": worst, "ok": worst < 1e-5}


def batch_invariance(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """A datum gets the same logprobs alone and inside a ragged batch."""
    lone = load.logprobs(load.main, [data[0]])[0]
    ragged = [load.datum(length, seed=length) for length in (3, 17, 65)]
    mixed = load.logprobs(load.main, [*ragged[:2], data[0], *ragged[2:]])[2]
    complete = len(lone) == len(mixed) == load.settings.seq
    worst = largest_difference([lone], [mixed])
    return {"max_abs_diff": worst, "len_ok": complete, "ok": worst < 1e-3 and complete}


def sampler_matches(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """The sampler's logprobs are the trainer's, and two samples of one request differ."""
    client = load.client()
    for _ in range(3):
        load.train(client, data, RATE)
    sampler, _ = load.publish(client)
    prompt = [load.rng.randrange(load.settings.vocab) for _ in range(12)]
    response = load.wait(
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=24, temperature=1.0, seed=3),
        )
    )
    worst = 0.0
    for sequence in response.sequences:
        rows = load.logprobs(client, [load.supervised([*prompt, *sequence.tokens])])
        trained = rows[0][len(prompt) - 1 :]
        worst = max(worst, largest_difference([trained], [list(sequence.logprobs or ())]))
    differ = response.sequences[0].tokens != response.sequences[1].tokens
    return {"max_abs_diff": worst, "samples_differ": differ, "ok": worst < 0.05 and differ}


def rl_loss(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Importance sampling with the trainer's own logprobs has ratio 1: the loss is minus the advantages' sum."""
    client = load.client()
    tokens = load.tokens_of(data[0])
    logprobs = load.logprobs(client, [data[0]])[0]
    count = len(logprobs)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count]),
            "logprobs": types.TensorData(data=logprobs, dtype="float32", shape=[count]),
            "advantages": types.TensorData(data=[0.5] * count, dtype="float32", shape=[count]),
        },
    )
    metrics = load.wait(client.forward_backward([datum], "importance_sampling")).metrics
    loss = metrics.get("loss:sum")
    good = loss is not None and abs(loss + 0.5 * count) < 1e-3 * count
    return {"metrics": dict(metrics), "expected_loss": -0.5 * count, "ok": good}


def ranks_differ(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """A client with another LoRA rank trains beside the others."""
    client = load.client(rank=max(1, load.settings.rank // 2))
    load.train(client, data, RATE)
    return {"ok": True}


def bad_input(load: Load, data: list[types.Datum]) -> dict[str, Any]:
    """Targets of the wrong length fail soon and in words, and the client stays usable."""
    client = load.client()
    bad = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[1, 2], dtype="int64", shape=[2]),
            "weights": types.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2]),
        },
    )
    said = "accepted"
    started = time.perf_counter()
    try:
        load.wait(client.forward_backward([bad], "cross_entropy"))
    except tinker.TinkerError as error:
        said = f"{type(error).__name__}: {str(error)[:160]}"
    after_s = time.perf_counter() - started
    usable = len(values(load.logprobs(client, [data[0]])[0])) == load.settings.seq
    good = said != "accepted" and after_s < 30 and usable
    return {"said": said, "after_s": round(after_s, 2), "usable": usable, "ok": good}


CHECKS: dict[str, Callable[[Load, list[types.Datum]], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        loss_falls,
        grads_add,
        order_kept,
        seed,
        resume_equals,
        isolation,
        batch_invariance,
        sampler_matches,
        rl_loss,
        ranks_differ,
        bad_input,
    )
}
