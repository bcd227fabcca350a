"""Captures and checkpoints through a backend: what is frozen, loaded back, and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_engine.commands.command import Destination
from lilo_engine.errors import InvalidRequest, NotFound, UserError
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref


def _destination(run: str, kind: str, name: str) -> Destination:
    return Destination(run_id=run, kind=kind, name=name, order=1, overwrite=False)  # type: ignore[arg-type]


def test_a_saved_state_goes_on_exactly_where_it_was_frozen(
    tied_backend: MilesBackend, model_id: str
) -> None:
    rng = np.random.default_rng(13)
    data = ref.ragged((5, 12), rng, vocab=97)
    live, resumed, cold = (f"{model_id}-{key}" for key in ("live", "resumed", "cold"))
    tied_backend.create_adapter(live, ref.spec(3, seed=1))
    for _ in range(3):
        ref.run(tied_backend, ref.item(live, data))
        tied_backend.optim_step(live, ref.ADAM)
    capture = tied_backend.capture(live, "training")
    ref.run(tied_backend, ref.item(live, data))
    tied_backend.optim_step(live, ref.ADAM)  # after the capture: must not reach the checkpoint
    published = tied_backend.persist(capture, _destination(live, "weights", "three"))
    with pytest.raises(UserError):
        tied_backend.persist(capture, _destination(live, "weights", "again"))
    source = CheckpointRef(run_id=live, kind="weights", name="three")

    for name, with_optimizer in ((resumed, True), (cold, False)):
        tied_backend.create_adapter(name, ref.spec(3, seed=2))
        ref.run(tied_backend, ref.item(name, data))  # gradients that loading must drop
        tied_backend.load(name, source, with_optimizer=with_optimizer)
        with pytest.raises(InvalidRequest):
            tied_backend.optim_step(name, ref.ADAM)
        ref.run(tied_backend, ref.item(name, data))
        tied_backend.optim_step(name, ref.ADAM)

    assert published.name == "three"
    ends = {name: ref.state_of(tied_backend, name) for name in (live, resumed, cold)}
    for name in (live, resumed, cold):
        tied_backend.unload(name)
    assert ends[live].optimizer_step == ends[resumed].optimizer_step == 4
    assert ends[cold].optimizer_step == 1
    assert all(
        torch.equal(ends[live].weights[n], ends[resumed].weights[n]) for n in ends[live].weights
    )
    assert any(
        not torch.equal(ends[live].weights[n], ends[cold].weights[n]) for n in ends[live].weights
    )


@pytest.mark.parametrize("other", [ref.spec(4), ref.spec(3, alpha=16.0), ref.spec(3, mlp=False)])
def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(
    tied_backend: MilesBackend, model_id: str, other: LoraSpec
) -> None:
    saved, target = f"{model_id}-saved", f"{model_id}-target"
    tied_backend.create_adapter(saved, ref.spec(3))
    tied_backend.create_adapter(target, other)
    capture = tied_backend.capture(saved, "training")
    tied_backend.persist(capture, _destination(saved, "weights", "x"))
    before = ref.state_of(tied_backend, target).weights
    with pytest.raises(UserError):
        tied_backend.load(
            target, CheckpointRef(run_id=saved, kind="weights", name="x"), with_optimizer=True
        )
    with pytest.raises(NotFound):
        tied_backend.load(
            target, CheckpointRef(run_id=saved, kind="weights", name="y"), with_optimizer=True
        )
    after = ref.state_of(tied_backend, target).weights
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in (saved, target):
        tied_backend.unload(name)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_an_exported_adapter_gives_the_trainers_logprobs_in_peft(
    name: str, random_models: dict[str, Definition], request: pytest.FixtureRequest, model_id: str
) -> None:
    backend: MilesBackend = request.getfixturevalue(f"{name}_backend")
    backend.create_adapter(model_id, ref.spec(3))
    ref.randomize(backend, model_id, scale=0.05)
    capture = backend.capture(model_id, "sampler")
    published = backend.persist(capture, _destination(model_id, "sampler_weights", "s"))
    datums = ref.ragged((1, 17, 64), np.random.default_rng(14), vocab=97)

    (output,) = ref.run(backend, ref.item(model_id, datums), forward_only=True)

    backend.unload(model_id)
    peft = ref.Reference.exported(random_models[name], Path(published.folder))
    for one, ours in zip(datums, output.logprobs, strict=True):
        with torch.no_grad():
            theirs = peft.logprobs(one).numpy()
        assert np.abs(ours.numpy() - theirs).max() <= 1e-4
