"""Loss, logprobs and every LoRA gradient against Hugging Face + PEFT on the same weights."""

from __future__ import annotations

import numpy as np
import pytest
from lilo_definitions import Definition, get
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref

TOLERANCE = 1e-5
"""max|d| / max|ref| per tensor, float32 on both sides: rounding of some hundred terms in another order."""

LENGTHS = (17, 128, 1, 2, 17)


@pytest.mark.parametrize("name", ["tiny", "tied", "untied"])
def test_loss_logprobs_and_gradients_equal_peft(
    name: str, random_models: dict[str, Definition], request: pytest.FixtureRequest
) -> None:
    backend: MilesBackend = request.getfixturevalue(f"{name}_backend")
    definition = get("tiny") if name == "tiny" else random_models[name]
    rng = np.random.default_rng(0)
    datums = ref.sums(12, rng) if name == "tiny" else ref.ragged(LENGTHS, rng, vocab=97)
    backend.create_adapter("parity", ref.spec(8))
    try:
        ref.randomize(backend, "parity")

        (output,) = ref.run(backend, ref.item("parity", datums))

        assert output.error is None
        reference = ref.Reference.of(definition, ref.state_of(backend, "parity"))
        expected = [reference.logprobs(d) for d in datums]
        loss = ref.cross_entropy(datums, expected)
        loss.backward()
        assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        assert [t.shape for t in output.logprobs] == [tuple(p.shape) for p in expected]
        for ours, theirs in zip(output.logprobs, expected, strict=True):
            assert np.abs(ours.numpy() - theirs.detach().numpy()).max() <= TOLERANCE
        gradients = ref.gradients_of(backend, "parity")
        assert {name.split(".")[-1] for name in ref.modules_of(gradients)} == set(ref.MODULES)
        for factor, theirs in reference.gradients().items():
            assert ref.relative(gradients[factor], theirs) <= TOLERANCE, factor
    finally:
        backend.unload("parity")


def test_several_targets_per_position_are_a_weighted_sum(
    tied_backend: MilesBackend, random_models: dict[str, Definition], model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(1)
    wide = [_wide_datum(rng, 5, 3), _wide_datum(rng, 9, 2)]
    plain = ref.datum(9, rng, vocab=97, weights=rng.normal(size=9))
    datums = [*wide, plain]

    (output,) = ref.run(tied_backend, ref.item(model_id, datums))

    reference = ref.Reference.of(random_models["tied"], ref.state_of(tied_backend, model_id))
    expected = [reference.logprobs(d) for d in datums]
    loss = ref.cross_entropy(datums, expected)
    loss.backward()
    assert [t.shape for t in output.logprobs] == [(5, 3), (9, 2), (9,)]
    assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert ref.worst(ref.gradients_of(tied_backend, model_id), reference.gradients()) <= TOLERANCE


def _wide_datum(rng: np.random.Generator, length: int, width: int):
    base = ref.datum(length, rng, vocab=97, weights=rng.normal(size=(length, width)))
    targets = ref.Tensor.of(rng.integers(0, 97, (length, width)), "int64")
    return ref.Datum(tokens=base.tokens, loss_inputs={**base.loss_inputs, "target_tokens": targets})


@pytest.mark.parametrize("lengths", [(6, 11), (9,)])
@pytest.mark.parametrize("group", ["attn", "mlp", "unembed"])
def test_one_flag_alone_trains_exactly_its_modules(
    tied_backend: MilesBackend,
    random_models: dict[str, Definition],
    model_id: str,
    group: str,
    lengths: tuple[int, ...],
) -> None:
    flags = {name: name == group for name in ref.GROUPS}
    tied_backend.create_adapter(model_id, ref.spec(4, **flags))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(2)
    datums = [ref.datum(n, rng, vocab=97) for n in lengths]

    ref.run(tied_backend, ref.item(model_id, datums))

    gradients = ref.gradients_of(tied_backend, model_id)
    assert {name.split(".")[-1] for name in ref.modules_of(gradients)} == set(ref.GROUPS[group])
    reference = ref.Reference.of(random_models["tied"], ref.state_of(tied_backend, model_id))
    ref.cross_entropy(datums, [reference.logprobs(d) for d in datums]).backward()
    assert ref.worst(gradients, reference.gradients()) <= TOLERANCE


def test_gradients_do_not_depend_on_how_rows_are_cut_into_microbatches(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(3)
    datums = [ref.datum(n, rng, vocab=97) for n in (2, 126, 40, 40)]

    ref.run(tied_backend, ref.item(model_id, datums))
    together = ref.gradients_of(tied_backend, model_id)
    tied_backend.drop_gradients(model_id)
    for one in datums:
        ref.run(tied_backend, ref.item(model_id, [one]))

    assert ref.worst(ref.gradients_of(tied_backend, model_id), together) <= TOLERANCE
