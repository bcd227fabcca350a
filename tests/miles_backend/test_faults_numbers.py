"""Faults B24 to B34 that others met in losses, padding, packing and parallel layouts, each tried here; named after them.

The reference is always a run without what the fault needs: the row alone, one rank, another cut. Those about files and
processes are in `test_faults_files.py` and `tests/cluster`; B32 is `tests/definitions/test_fields.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import anyio
import numpy as np
import pytest
import torch
from lilo_definitions import Definition, get
from lilo_engine.sampling.engine import SamplerConfig
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.ranks.rank import Rank
from lilo_miles_backend.sampler import EmbeddedSampler

from tests.miles_backend import reference as ref
from tests.miles_backend.layouts import World, laid_out, world
from tests.sampling.words import SUM, floats, request, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLOSE = 1e-5
"""max|d| / max|ref| between layouts and cuts, float32: rounding of sums in another order."""
RAGGED = (1, 2, 17, 128)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Definition:
    """A random model with four key/value heads; a small limit cuts its batches into several microbatches."""
    folder = tmp_path_factory.mktemp("four") / "four"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    return ref.write_random_model(folder, tied=False, **sizes)


@pytest.fixture(scope="module")
def one(four: Definition) -> Iterator[MilesBackend]:
    backend = ref.start(four)
    backend.create_adapter("m", ref.spec(8))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def cp4(four: Definition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(laid_out(four, cp=4), tmp_path_factory.mktemp("cp4")) as ranks:
        ranks.create("m", ref.spec(8))
        yield ranks


@pytest.fixture(scope="module")
def dp4(four: Definition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(laid_out(four, dp=4), tmp_path_factory.mktemp("dp4")) as ranks:
        ranks.create("m", ref.spec(8))
        yield ranks


@pytest.fixture(scope="module")
def tp2cp2(four: Definition, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(laid_out(four, tp=2, cp=2), tmp_path_factory.mktemp("tp2cp2")) as ranks:
        ranks.create("m", ref.spec(8))
        yield ranks


@pytest.fixture
def alone(one: MilesBackend, cp4: World) -> MilesBackend:
    """One rank with the weights that the layouts' adapters start from."""
    one.drop_gradients("m")
    adapter = one.ranks.rank.adapter("m")
    start = cp4.state("m").weights
    for name, factor in adapter.named(adapter.weights).items():
        factor.copy_(start[name])
    return one


def rows(lengths: tuple[int, ...], seed: int = 0) -> list[ref.Datum]:
    return ref.ragged(lengths, np.random.default_rng(seed), vocab=97)


def logprobs(output: ref.Output) -> np.ndarray:
    assert output.error is None
    return np.concatenate([tensor.numpy().reshape(-1) for tensor in output.logprobs])


def test_b24_every_row_of_a_ragged_batch_has_the_logprobs_it_has_alone(
    tp2cp2: World, alone: MilesBackend
) -> None:
    datums = rows(RAGGED)
    (together,) = tp2cp2.run(ref.item("m", datums), forward_only=True)
    for datum, ours in zip(datums, together.logprobs, strict=True):
        (lone,) = ref.run(alone, ref.item("m", [datum]), forward_only=True)
        assert ours.shape == datum.loss_inputs["target_tokens"].shape
        assert np.abs(ours.numpy() - logprobs(lone)).max() <= CLOSE


@pytest.mark.parametrize("position", [0, 6, 10], ids=["first", "first of the response", "last"])
def test_b25_a_weight_at_one_position_trains_exactly_that_position(
    cp4: World, four: Definition, position: int
) -> None:
    weights = np.zeros(11)
    weights[position] = 1.0
    datum = ref.datum(11, np.random.default_rng(1), vocab=97, weights=weights)
    for forward_only in (True, False):
        (output,) = cp4.run(ref.item("m", [datum]), forward_only=forward_only)
        assert output.logprobs[0].shape == (11,)
    model = ref.Reference.of(four, cp4.state("m"), torch.float64)
    (-model.logprobs(datum)[position]).backward()
    found, wanted = cp4.gradients("m"), model.gradients()
    # What no query of this position can reach is zero in exact arithmetic, and rounding of the largest in float32.
    largest = max(float(one.abs().max()) for one in wanted.values())
    for name, theirs in wanted.items():
        scale = max(float(theirs.abs().max()), 1e-2 * largest)
        assert float((found[name].double() - theirs).abs().max()) <= 10 * CLOSE * scale, name
    cp4.drop_gradients("m")


def test_b25_a_policy_loss_gives_one_logprob_per_target(cp4: World) -> None:
    rng = np.random.default_rng(2)
    datum = ref.datum(7, rng, vocab=97, logprobs=-np.ones(7), advantages=rng.normal(size=7))
    (output,) = cp4.run(ref.item("m", [datum]), loss="importance_sampling")
    assert output.error is None
    assert output.logprobs[0].shape == (7,)
    cp4.drop_gradients("m")


@pytest.mark.parametrize("layout", ["dp4", "cp4", "tp2cp2"])
def test_b26_b27_loss_and_gradients_depend_neither_on_the_cut_nor_on_the_layout(
    layout: str, alone: MilesBackend, request: pytest.FixtureRequest
) -> None:
    ranks: World = request.getfixturevalue(layout)
    datums = rows((2, 126, 31, 8))
    (output,) = ranks.run(ref.item("m", datums))
    for one in datums:  # each alone: the finest cut
        ref.run(alone, ref.item("m", [one]))

    apart = ref.gradients_of(alone, "m")
    alone.drop_gradients("m")
    (whole,) = ref.run(alone, ref.item("m", datums))
    loss = whole.metrics["loss:sum"]
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE)
    assert output.metrics["tokens:sum"] == whole.metrics["tokens:sum"]
    assert np.abs(logprobs(output) - logprobs(whole)).max() <= CLOSE
    gradients = ranks.gradients("m")
    assert ref.worst(gradients, apart) <= CLOSE
    assert ref.worst(gradients, ref.gradients_of(alone, "m")) <= CLOSE
    norms = [np.linalg.norm(ref.flat(one).astype(np.float64)) for one in (gradients, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=CLOSE)
    ranks.drop_gradients("m")


@pytest.mark.parametrize("layout", ["cp4", "tp2cp2"])
def test_b27_a_ratio_per_sequence_is_that_of_the_whole_sequence(
    layout: str, alone: MilesBackend, request: pytest.FixtureRequest
) -> None:
    ranks: World = request.getfixturevalue(layout)
    rng = np.random.default_rng(4)
    datums = [
        ref.datum(
            n,
            rng,
            vocab=97,
            logprobs=rng.normal(size=n) - 5,
            advantages=rng.normal(size=n),
            sequence_ratio_mask=np.ones(n),
        )
        for n in (9, 30)
    ]
    (ours,) = ranks.run(ref.item("m", datums), loss="gspo")
    (theirs,) = ref.run(alone, ref.item("m", datums), loss="gspo")
    loss = theirs.metrics["loss:sum"]
    assert ours.metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE)
    assert ref.worst(ranks.gradients("m"), ref.gradients_of(alone, "m")) <= CLOSE
    ranks.drop_gradients("m")


def test_b28_tiny_and_odd_rows_fit_between_zigzag_chunks(cp4: World, alone: MilesBackend) -> None:
    datums = rows((1, 2, 3, 7, 8, 9, 15, 17), seed=5)
    (ours,) = cp4.run(ref.item("m", datums), forward_only=True)
    (theirs,) = ref.run(alone, ref.item("m", datums), forward_only=True)
    assert np.abs(logprobs(ours) - logprobs(theirs)).max() <= CLOSE
    for length in (1, 7, 9):  # a lone row leaves ranks with padding alone
        (lone,) = cp4.run(ref.item("m", rows((length,), seed=6)))
        assert lone.error is None
        cp4.drop_gradients("m")


@pytest.mark.parametrize("layout", ["one", "cp4", "tp2cp2"])
def test_b28_a_streams_own_padding_changes_nothing_but_its_length(
    layout: str, one: MilesBackend, request: pytest.FixtureRequest
) -> None:
    ranks = None if layout == "one" else request.getfixturevalue(layout)
    datums = rows((3, 50, 29, 1), seed=8)
    found = []
    for bucket_tokens in (None, 1 << 20):
        if ranks is None:
            padded_to(one.ranks.rank, bucket_tokens)
            (output,) = ref.run(one, ref.item("m", datums))
            gradients = ref.gradients_of(one, "m")
            one.drop_gradients("m")
        else:
            ranks.call(padded_to, bucket_tokens)
            (output,) = ranks.run(ref.item("m", datums))
            gradients = ranks.gradients("m")
            ranks.drop_gradients("m")
        found.append((output, gradients))
    (plain, wanted), (padded, gradients) = found
    assert padded.metrics["padded_tokens:sum"] > plain.metrics["padded_tokens:sum"]
    assert padded.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=CLOSE / 10)
    assert np.abs(logprobs(padded) - logprobs(plain)).max() <= CLOSE / 10
    assert ref.worst(gradients, wanted) <= CLOSE / 10
    if ranks is None:
        padded_to(one.ranks.rank, None)
    else:
        ranks.call(padded_to, None)


def padded_to(rank: Rank, bucket_tokens: int | None) -> None:
    """What a GPU's rank does always."""
    batches = rank._batches
    layout = replace(batches.limits.layout, bucket_tokens=bucket_tokens)
    batches.limits = replace(batches.limits, layout=layout)


def test_b29_a_row_in_a_pack_sees_nothing_of_its_neighbour(tp2cp2: World) -> None:
    a, b = rows((13, 7), seed=7)
    (packed,) = tp2cp2.run(ref.item("m", [a, b]), forward_only=True)
    for datum, ours in zip((a, b), packed.logprobs, strict=True):
        (lone,) = tp2cp2.run(ref.item("m", [datum]), forward_only=True)
        assert np.abs(ours.numpy() - logprobs(lone)).max() <= CLOSE / 10
    changed = ref.ragged((7,), np.random.default_rng(70), vocab=97)
    (other,) = tp2cp2.run(ref.item("m", [a, *changed]), forward_only=True)
    assert other.logprobs[0].data == packed.logprobs[0].data


def test_b30_replicated_factors_train_together_and_as_on_one_rank(
    four: Definition, tmp_path_factory: pytest.TempPathFactory
) -> None:
    params = replace(ref.ADAM, learning_rate=1e-4)
    backend = ref.start(four)
    backend.create_adapter("m", ref.spec(8))
    with world(laid_out(four, tp=2), tmp_path_factory.mktemp("tp2")) as ranks:
        ranks.create("m", ref.spec(8))
        adapter = backend.ranks.rank.adapter("m")
        for name, value in ranks.state("m").weights.items():
            adapter.named(adapter.weights)[name].copy_(value)
        for step in range(5):
            datums = rows((17, 5), seed=step)
            ranks.run(ref.item("m", datums))
            ref.run(backend, ref.item("m", datums))
            ranks.step("m", params)
            backend.optim_step("m", params)
            ours = ranks.state("m").weights  # compares replicas bit for bit
        theirs = ref.state_of(backend, "m").weights
    # Adam divides by the gradient's own size, so a gradient that is rounding alone moves a weight by whole steps.
    moved = 5 * params.learning_rate
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert worst <= 0.05 * moved
    backend.close()


@pytest.mark.anyio
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_b33_the_trainer_scores_samples_without_their_temperature(
    tiny_backend: MilesBackend, model_id: str, temperature: float
) -> None:
    tiny_backend.create_adapter(model_id, ref.spec(4))  # its B is zero: the base model
    sampler = EmbeddedSampler(SamplerConfig(definition=get("tiny")))
    try:
        with anyio.fail_after(60):
            sampled = await sampler.sample(
                request(seed=1, max_tokens=12, temperature=temperature, prompt_logprobs=True)
            )
    finally:
        await sampler.close()
    (sequence,) = sampled.sequences
    ids = np.array([*SUM, *tokens(sequence)])
    inputs = {"target_tokens": ref.Tensor.of(ids[1:], "int64")}
    scored = ref.Datum(tokens=ref.Tensor.of(ids[:-1], "int32"), loss_inputs=inputs)
    (output,) = ref.run(tiny_backend, ref.item(model_id, [scored]), forward_only=True)
    told = [*floats(sampled.prompt_logprobs)[1:], *floats(sequence.logprobs)]
    assert np.abs(logprobs(output) - np.array(told)).max() <= 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_b34_rows_come_back_in_order_from_more_or_fewer_ranks_than_rows(
    dp4: World, alone: MilesBackend, count: int
) -> None:
    datums = rows((5, 9, 2, 17, 9, 1, 30)[:count], seed=count)
    (ours,) = dp4.run(ref.item("m", datums))
    (theirs,) = ref.run(alone, ref.item("m", datums))
    assert [one.shape for one in ours.logprobs] == [one.shape for one in theirs.logprobs]
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.abs(mine.numpy() - other.numpy()).max() <= CLOSE
    assert ref.worst(dp4.gradients("m"), ref.gradients_of(alone, "m")) <= 10 * CLOSE
    dp4.drop_gradients("m")
