"""Ranks in a grid: the numbers of Hugging Face + PEFT, replicas that stay equal, the same bits each time.

All eight layouts with all lengths are `make prove-parity`; here are the smallest that hold every axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_miles_backend.rank_commands import RunBatch
from lilo_miles_backend.ranks.reduction import gradient_norm

from tests.miles_backend import reference as ref
from tests.miles_backend.layouts import World, laid_out, world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUMBERS = 1e-5
"""max|d| / max|ref|, float32 against float64."""
RANKS = (1, 8, 32)
LENGTHS = (17, 3, 40, 1, 2, 6)
"""40 on one of two data-parallel ranks, 29 on the other: shares of tensor-parallel ranks that are not equal."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Definition:
    """A random model with four key/value heads."""
    folder = tmp_path_factory.mktemp("four") / "four"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    return ref.write_random_model(folder, tied=True, **sizes)


@pytest.fixture(scope="module", params=[(2, 2, 1), (2, 1, 2)], ids=["tp2 cp2", "tp2 dp2"])
def ranks(
    request: pytest.FixtureRequest, four: Definition, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    tp, cp, dp = request.param
    with world(laid_out(four, tp=tp, cp=cp, dp=dp), tmp_path_factory.mktemp("ranks")) as started:
        for lora_rank in RANKS:
            started.create(f"r{lora_rank}", ref.spec(lora_rank))
        yield started


def test_adapters_of_several_ranks_together_have_the_numbers_of_peft(ranks: World) -> None:
    rng = np.random.default_rng(0)
    items = [ref.item(f"r{r}", ref.ragged(LENGTHS, rng, vocab=97)) for r in RANKS]

    outputs = ranks.run(*items)

    for item, output in zip(items, outputs, strict=True):
        assert output.error is None
        model = ref.Reference.of(ranks.definition, ranks.state(item.model_id), torch.float64)
        expected = [model.logprobs(one) for one in item.datums]
        loss = ref.cross_entropy(item.datums, expected)
        loss.backward()
        assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=NUMBERS)
        assert [one.shape for one in output.logprobs] == [tuple(p.shape) for p in expected]
        for ours, theirs in zip(output.logprobs, expected, strict=True):
            assert np.abs(ours.numpy() - theirs.detach().numpy()).max() <= NUMBERS
        assert ref.worst(ranks.gradients(item.model_id), model.gradients()) <= NUMBERS
        ranks.drop_gradients(item.model_id)


def test_replicas_stay_bit_equal_and_steps_are_adamws(ranks: World) -> None:
    params = replace(ref.ADAM, weight_decay=0.1, grad_clip_norm=1.0)
    # Reading a state or gradients compares what several ranks hold, bit for bit.
    start = ranks.state("r8")
    gradients: list[dict[str, torch.Tensor]] = []
    for step in range(5):
        rng = np.random.default_rng(step)
        ranks.run(ref.item("r8", ref.ragged((17, 2, 9), rng, vocab=97)))
        gradients.append(ranks.gradients("r8"))
        metrics = ranks.step("r8", params)
        norm = np.linalg.norm(ref.flat(gradients[-1]).astype(np.float64))
        assert metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert metrics.count(metrics[0]) == len(metrics)
        ranks.state("r8")
    end = ranks.state("r8")

    names = list(start.weights)
    flat = [ref.flat({name: one[name] for name in names}) for one in gradients]
    theirs = ref.adamw64(ref.flat(start.weights), flat, [params] * 5)
    ours = ref.flat({name: end.weights[name] for name in names})
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


def test_a_layout_gives_the_same_bits_each_time(ranks: World) -> None:
    datums = ref.ragged(LENGTHS, np.random.default_rng(1), vocab=97)
    runs = []
    for name in ("again-1", "again-2"):
        ranks.create(name, ref.spec(4))
        (output,) = ranks.run(ref.item(name, datums))
        ranks.step(name, ref.ADAM)
        runs.append((output, ref.flat(ranks.state(name).weights)))
        ranks.unload(name)

    (first, weights), (second, same) = runs
    assert ref.numbers(first) == ref.numbers(second)
    assert np.array_equal(weights, same)


def test_a_loss_that_is_not_finite_on_one_rank_drops_the_window_on_all(ranks: World) -> None:
    rng = np.random.default_rng(2)
    bad = [ref.datum(n, rng, vocab=97, weights=np.full(n, w)) for n, w in ((9, np.inf), (4, 1.0))]
    good = ref.ragged((9, 4), rng, vocab=97)

    spoilt, healthy = ranks.run(ref.item("r1", bad), ref.item("r32", good))

    assert spoilt.error is not None
    assert "loss" in spoilt.error
    assert healthy.error is None
    assert not any(one.any() for one in ranks.gradients("r1").values())
    assert any(one.any() for one in ranks.gradients("r32").values())
    ranks.drop_gradients("r32")


def test_a_non_finite_gradient_skips_the_step_on_all_ranks(ranks: World) -> None:
    ranks.run(ref.item("r1", ref.ragged((9, 4), np.random.default_rng(3), vocab=97)))
    before = ref.flat(ranks.state("r1").weights)
    ranks.call(_spoil_on_the_last_rank, "r1")

    metrics = ranks.step("r1", ref.ADAM)

    assert [one["skipped"] for one in metrics] == [1.0] * len(metrics)
    assert np.array_equal(ref.flat(ranks.state("r1").weights), before)


def test_adapters_add_no_collective_to_a_pass(ranks: World) -> None:
    ranks.create("all", ref.spec(4))
    ranks.create("few", ref.spec(4, attn=False, unembed=False))
    datums = tuple(ref.ragged((9, 4), np.random.default_rng(4), vocab=97))
    counts = [ranks.call(_collectives_of_a_pass, name, datums) for name in ("all", "few")]
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0
    for name in ("all", "few"):
        ranks.unload(name)


def _collectives_of_a_pass(rank: Any, model_id: str, datums: tuple[ref.Datum, ...]) -> int:
    """How often this rank talks to others in one forward and backward."""
    import torch.distributed as dist

    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    endings = ("", "_single", "_into_tensor", "_tensor")
    names = [kind + ending for kind in kinds for ending in endings if hasattr(dist, kind + ending)]
    real = {name: getattr(dist, name) for name in names}
    calls: list[str] = []

    def counted(name: str) -> Any:
        return lambda *args, **kwargs: (calls.append(name), real[name](*args, **kwargs))[1]

    batch = ref.Batch(
        loss="cross_entropy",
        config={},
        forward_only=False,
        items=(ref.item(model_id, datums),),
    )
    for name in names:
        setattr(dist, name, counted(name))
    try:
        rank.execute(RunBatch(batch=batch))
    finally:
        for name in names:
            setattr(dist, name, real[name])
    return len(calls)


def _spoil_on_the_last_rank(rank: Any, model_id: str) -> None:
    if rank.parallel.rank == rank.parallel.world_size - 1:
        rank.adapter(model_id).gradients[-1] = torch.inf


def test_a_layout_that_does_not_divide_the_model_is_refused_by_its_numbers(
    four: Definition, tmp_path: Path
) -> None:
    with (
        pytest.raises(AssertionError, match=r"topology.tp 3 does not divide num_key_value_heads 4"),
        world(laid_out(four, tp=3), tmp_path),
    ):
        pass


def test_where_padding_is_off_a_row_that_needs_it_is_refused_alone_and_by_the_multiple(
    four: Definition, tmp_path: Path
) -> None:
    off = laid_out(four, cp=2, topology={"align_sequences_to_parallel_layout": "off"})
    rng = np.random.default_rng(0)
    with world(off, tmp_path) as ranks:
        ranks.create("odd", ref.spec(1))
        ranks.create("even", ref.spec(1))
        odd, even = ranks.run(
            ref.item("odd", ref.ragged((8, 7), rng, vocab=97)),
            ref.item("even", ref.ragged((8, 4), rng, vocab=97)),
        )
        assert odd.error is not None
        assert "multiple of 4" in odd.error
        assert even.error is None
        assert not any(one.any() for one in ranks.gradients("odd").values())


def test_the_norm_of_one_rank_counts_every_factor_once(four: Definition) -> None:
    backend = ref.start(four)
    backend.create_adapter("m", ref.spec(4))
    ref.randomize(backend, "m")
    ref.run(backend, ref.item("m", ref.ragged((9,), np.random.default_rng(0), vocab=97)))
    adapter = backend.ranks.rank.adapter("m")
    norm = np.linalg.norm(ref.flat(ref.gradients_of(backend, "m")).astype(np.float64))
    assert gradient_norm(adapter, None).item() == pytest.approx(float(norm), rel=1e-12)
    backend.close()
