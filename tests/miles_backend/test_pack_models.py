"""Rows of several models in one microbatch: each model's numbers are those it has alone, whatever its neighbours do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from lilo_definitions import Definition
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref
from tests.miles_backend.layouts import laid_out, world

ALONE = 1e-6
"""max|d| / max|ref| per tensor between co-batched and alone."""
MODELS = {
    "small": ref.spec(1, seed=1),
    "wide": ref.spec(32, seed=2),
    "attention": ref.spec(4, seed=3, mlp=False, unembed=False),
    "layers": ref.spec(2, seed=5, unembed=False),
    "head": ref.spec(8, seed=4, attn=False, mlp=False),
    "like head": ref.spec(8, seed=6),
    "another like it": ref.spec(8, seed=7),
}
LENGTHS = {
    "small": (9, 2),
    "wide": (33, 1, 17),
    "attention": (5,),
    "layers": (4, 11),
    "head": (12, 7),
    "like head": (7, 1),
    "another like it": (6, 3),
}


@pytest.fixture(scope="module")
def backend(
    random_models: dict[str, Definition], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilesBackend]:
    definition = random_models["tied"].derive(
        trainer={"pack_models": True}, limits={"max_tokens_per_rank": 256}
    )
    started = ref.start(definition, tmp_path_factory.mktemp("packed"))
    for seed, (model_id, spec) in enumerate(MODELS.items()):
        started.create_adapter(model_id, spec)
        ref.randomize(started, model_id, seed=seed)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def fresh_windows(backend: MilesBackend) -> None:
    for model_id in MODELS:
        backend.drop_gradients(model_id)


def datums_of(model_id: str) -> list[ref.Datum]:
    rng = np.random.default_rng(sorted(MODELS).index(model_id))
    return ref.ragged(LENGTHS[model_id], rng, vocab=97)


def gradients(backend: MilesBackend) -> dict[str, dict[str, ref.torch.Tensor]]:
    return {model_id: ref.gradients_of(backend, model_id) for model_id in MODELS}


def test_co_batched_equals_alone(backend: MilesBackend) -> None:
    items = [ref.item(model_id, datums_of(model_id)) for model_id in MODELS]
    together = ref.run(backend, *items)
    packed = gradients(backend)
    for model_id in MODELS:
        backend.drop_gradients(model_id)
    for item, ours in zip(items, together, strict=True):
        (alone,) = ref.run(backend, item)
        assert ours.error is None
        assert ours.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=ALONE)
        for left, right in zip(ours.logprobs, alone.logprobs, strict=True):
            assert left.shape == right.shape
            assert np.abs(left.numpy() - right.numpy()).max() <= ALONE
    apart = gradients(backend)
    for model_id in MODELS:
        assert ref.worst(packed[model_id], apart[model_id]) <= ALONE, model_id


def test_a_neighbours_failure_is_its_own(backend: MilesBackend) -> None:
    good = [ref.item(model_id, datums_of(model_id)) for model_id in ("small", "attention")]
    rng = np.random.default_rng(9)
    bad = [ref.datum(6, rng, vocab=97, weights=np.full(6, np.inf))]
    ref.run(backend, *good)
    wanted = gradients(backend)
    for model_id in MODELS:
        backend.drop_gradients(model_id)

    small, spoilt, attention = ref.run(backend, good[0], ref.item("wide", bad), good[1])

    assert (small.error, attention.error) == (None, None)
    assert spoilt.error is not None
    for model_id in ("small", "attention"):
        found = ref.gradients_of(backend, model_id)
        assert ref.worst(found, wanted[model_id]) <= ALONE
    assert not any(one.any() for one in ref.gradients_of(backend, "wide").values())


def test_two_items_of_one_model_add_up(backend: MilesBackend) -> None:
    datums = datums_of("wide")
    ref.run(backend, ref.item("wide", datums), ref.item("small", datums_of("small")))
    whole = ref.gradients_of(backend, "wide")
    backend.drop_gradients("wide")
    first, second = ref.run(
        backend, ref.item("wide", datums[:1], "1"), ref.item("wide", datums[1:], "2")
    )
    assert [len(first.logprobs), len(second.logprobs)] == [1, 2]
    assert ref.worst(ref.gradients_of(backend, "wide"), whole) <= 10 * ALONE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_models_share_microbatches_on_ranks_that_cut_rows_too(
    random_models: dict[str, Definition], tmp_path_factory: pytest.TempPathFactory
) -> None:
    definition = laid_out(random_models["untied"], tp=2, cp=2, trainer={"pack_models": True})
    with world(definition, tmp_path_factory.mktemp("packed-ranks")) as ranks:
        for model_id, spec in MODELS.items():
            ranks.create(model_id, spec)
        items = [ref.item(model_id, datums_of(model_id)) for model_id in MODELS]
        together = ranks.run(*items)
        packed = {model_id: ranks.gradients(model_id) for model_id in MODELS}
        for item, ours in zip(items, together, strict=True):
            model_id = item.model_id
            ranks.drop_gradients(model_id)
            (alone,) = ranks.run(item)
            assert ours.error is None
            assert ours.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=ALONE)
            assert ref.worst(packed[model_id], ranks.gradients(model_id)) <= 2 * ALONE
