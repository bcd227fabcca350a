"""Every loss against float64 formulas written out token by token, seen through the backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.tensor import Tensor
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.ranks.losses import Objective
from lilo_miles_backend.ranks.token_loss import TokenLoss

from tests.miles_backend import reference as ref

TOLERANCE = 1e-5

CASES = [
    ("cross_entropy", {}, ()),
    ("cross_entropy", {}, ("weights",)),
    ("importance_sampling", {}, ()),
    ("ppo", {}, ()),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}, ()),
    ("ppo", {}, ("clip_low_threshold", "clip_high_threshold")),
    ("cispo", {"clip_high_threshold": 1.05}, ()),
    ("cispo", {}, ("clip_low_threshold", "clip_high_threshold")),
    ("dro", {}, ()),
    ("dro", {"beta": 0.7}, ()),
    ("gspo", {}, ()),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}, ()),
]


@pytest.mark.parametrize(("loss", "config", "extra"), CASES)
def test_a_loss_and_its_gradient_equal_the_written_formula(
    tied_backend: MilesBackend,
    random_models: dict[str, Definition],
    model_id: str,
    loss: str,
    config: dict[str, float],
    extra: tuple[str, ...],
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(4)
    plain = [ref.datum(n, rng, vocab=97) for n in (7, 1, 12)]
    (base,) = ref.run(tied_backend, ref.item(model_id, plain), forward_only=True)
    datums = [
        _with_inputs(d, p.numpy(), loss, extra, rng)
        for d, p in zip(plain, base.logprobs, strict=True)
    ]

    (output,) = ref.run(tied_backend, ref.item(model_id, datums), loss=loss, config=config)

    assert output.error is None
    reference = ref.Reference.of(random_models["tied"], ref.state_of(tied_backend, model_id))
    total = 0.0
    for one in datums:
        p = reference.logprobs(one)
        value, slope = ref.loss_and_slope(loss, p.detach().double().numpy(), _arrays(one), config)
        total += value
        p.backward(torch.from_numpy(slope).float())
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=TOLERANCE, abs=TOLERANCE)
    assert ref.worst(ref.gradients_of(tied_backend, model_id), reference.gradients()) <= TOLERANCE


def _with_inputs(
    datum: Datum, p: np.ndarray, loss: str, extra: tuple[str, ...], rng: np.random.Generator
) -> Datum:
    """Sampling logprobs 0.3 around the trainer's own, so that some ratios are clipped and none sits on a bound."""
    n = datum.num_tokens
    inputs: dict[str, np.ndarray] = {}
    if loss != "cross_entropy":
        inputs = {"logprobs": p + rng.normal(size=n) * 0.3, "advantages": rng.normal(size=n)}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(n) < 0.6).astype(float)
    if "weights" in extra:
        inputs["weights"] = rng.normal(size=n)
    if "clip_low_threshold" in extra:
        inputs["clip_low_threshold"] = rng.uniform(0.7, 0.9, n)
        inputs["clip_high_threshold"] = rng.uniform(1.1, 1.3, n)
    tensors = {name: Tensor.of(values, "float32") for name, values in inputs.items()}
    return Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, **tensors})


def _arrays(datum: Datum) -> dict[str, np.ndarray]:
    return {
        name: tensor.numpy().astype(np.float64)
        for name, tensor in datum.loss_inputs.items()
        if name != "target_tokens"
    }


def test_equal_weights_scale_the_gradient_exactly(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    one = ref.datum(9, np.random.default_rng(5), vocab=97)
    doubled = Datum(
        tokens=one.tokens,
        loss_inputs={**one.loss_inputs, "weights": Tensor.of(np.full(9, -2.0), "float32")},
    )

    ref.run(tied_backend, ref.item(model_id, [one]))
    plain = ref.gradients_of(tied_backend, model_id)
    tied_backend.drop_gradients(model_id)
    ref.run(tied_backend, ref.item(model_id, [doubled]))

    for name, gradient in ref.gradients_of(tied_backend, model_id).items():
        assert torch.equal(gradient, -2.0 * plain[name]), name


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("custom_thing", {}),
        ("ppo", {"clip_middle": 1.0}),
        ("cross_entropy", {"beta": 0.1}),
        ("dro", {"beta": "much"}),
    ],
)
def test_an_unknown_loss_or_setting_that_got_past_the_engine_runs_nothing(
    tied_backend: MilesBackend, model_id: str, loss: str, config: dict[str, float | str]
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    one = ref.datum(3, np.random.default_rng(6), vocab=97)

    with pytest.raises(AssertionError):
        ref.run(tied_backend, ref.item(model_id, [one]), loss=loss, config=config)
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)


def test_a_token_whose_loss_is_not_finite_has_no_slope_and_its_neighbours_have_theirs() -> None:
    losses = torch.empty(3, 1, dtype=torch.float64)
    advantages = torch.tensor([[1.0], [torch.inf], [2.0]], dtype=torch.float64)
    inputs = {"advantages": advantages, "logprobs": torch.zeros(3, 1, dtype=torch.float64)}
    loss = TokenLoss(Objective.of("importance_sampling", {}), inputs, losses)
    slope = loss.slope(slice(0, 3), torch.zeros(3, 1))
    assert slope.tolist() == [[-1.0], [0.0], [-2.0]]
    assert losses.isfinite().tolist() == [[True], [False], [True]]
