"""Faults that other people met with files, tried on ours. B31 and B36 need several ranks: `test_saved_layouts.py`; B35 is
`checkpoints/test_two_views.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_engine.commands.command import Destination, Published
from lilo_engine.errors import CommandFailed, NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend import MilesBackend
from safetensors.torch import load_file

from tests.miles_backend import reference as ref

DATA = ref.ragged((5, 12), np.random.default_rng(20), vocab=97)


def train(backend: MilesBackend, model_id: str, steps: int = 1) -> None:
    for _ in range(steps):
        (output,) = ref.run(backend, ref.item(model_id, DATA))
        assert output.error is None
        backend.optim_step(model_id, ref.ADAM)


def save(
    backend: MilesBackend, model_id: str, name: str, kind: str = "weights", **fields: object
) -> Published:
    capture = backend.capture(model_id, "training" if kind == "weights" else "sampler")
    return backend.persist(
        capture,
        Destination(run_id=model_id, kind=kind, name=name, order=1, overwrite=True, **fields),  # type: ignore[arg-type]
    )


def same(one: MilesBackend, a: str, b: str) -> bool:
    left, right = ref.state_of(one, a).weights, ref.state_of(one, b).weights
    return all(torch.equal(left[name], right[name]) for name in left)


def test_b42_with_the_optimizer_is_the_live_run_bit_for_bit_and_without_it_is_not(
    tied_backend: MilesBackend, model_id: str
) -> None:
    live, warm, cold = (f"{model_id}-{key}" for key in ("live", "warm", "cold"))
    tied_backend.create_adapter(live, ref.spec(2))
    train(tied_backend, live, 5)
    save(tied_backend, live, "five")
    source = CheckpointRef(run_id=live, kind="weights", name="five")
    for name, with_optimizer in ((warm, True), (cold, False)):
        tied_backend.create_adapter(name, ref.spec(2, seed=9))
        tied_backend.prepare_load(source, with_optimizer=with_optimizer)
        tied_backend.load(name, source, with_optimizer=with_optimizer)
    fresh = ref.state_of(tied_backend, cold)
    assert fresh.optimizer_step == 0
    assert not any(moment.any() for moment in (*fresh.exp_avg.values(), *fresh.exp_avg_sq.values()))
    for name in (live, warm, cold):
        train(tied_backend, name)
    assert same(tied_backend, live, warm)
    assert not same(tied_backend, live, cold)
    for name in (live, warm, cold):
        tied_backend.unload(name)


@pytest.mark.parametrize("first", ["weights", "sampler_weights"])
def test_b43_a_state_and_a_snapshot_of_one_name_are_two_things_in_either_order(
    tied_backend: MilesBackend, model_id: str, first: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(2))
    train(tied_backend, model_id)
    kinds = [first, *({"weights", "sampler_weights"} - {first})]
    folders = [save(tied_backend, model_id, "x", kind).folder for kind in kinds]
    assert len(set(folders)) == 2
    before = ref.state_of(tied_backend, model_id)
    train(tied_backend, model_id)
    tied_backend.load(
        model_id, CheckpointRef(run_id=model_id, kind="weights", name="x"), with_optimizer=True
    )
    after = ref.state_of(tied_backend, model_id)
    assert all(torch.equal(before.exp_avg[name], after.exp_avg[name]) for name in before.exp_avg)
    snapshot = folders[kinds.index("sampler_weights")]
    assert len(load_file(Path(snapshot) / "adapter_model.safetensors")) == len(before.weights)


def test_b44_an_export_holds_every_tensor_and_what_was_trained_is_in_it(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(3))
    train(tied_backend, model_id, 2)
    published = save(tied_backend, model_id, "s", "sampler_weights")
    tensors = load_file(Path(published.folder) / "adapter_model.safetensors")
    assert len(tensors) == len(ref.state_of(tied_backend, model_id).weights) == 2 * (2 * 7 + 1)
    assert all(tensor.norm() > 0 for tensor in tensors.values())


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_b45_b46_peft_knows_every_key_of_an_export_and_answers_as_the_trainer(
    name: str, random_models: dict[str, Definition], request: pytest.FixtureRequest, model_id: str
) -> None:
    backend: MilesBackend = request.getfixturevalue(f"{name}_backend")
    backend.create_adapter(model_id, ref.spec(3))
    train(backend, model_id, 2)
    published = save(backend, model_id, "s", "sampler_weights")
    (output,) = ref.run(backend, ref.item(model_id, DATA), forward_only=True)
    peft = ref.Reference.exported(random_models[name], Path(published.folder))
    for one, ours in zip(DATA, output.logprobs, strict=True):
        with torch.no_grad():
            assert np.abs(ours.numpy() - peft.logprobs(one).numpy()).max() <= 1e-4


def test_b47_a_writer_that_raises_is_an_error_and_nothing_of_it_or_before_it_is_found(
    tied_backend: MilesBackend, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("cannot serialise")

    tied_backend.create_adapter(model_id, ref.spec(2))
    first = save(tied_backend, model_id, "s", "sampler_weights")
    with monkeypatch.context() as patch:
        patch.setattr("lilo_miles_backend.checkpoints.sampler.write_safetensors", broken)
        with pytest.raises(CommandFailed, match="cannot serialise"):
            save(tied_backend, model_id, "s", "sampler_weights")
        with pytest.raises(CommandFailed):
            save(tied_backend, model_id, "other", "sampler_weights")
    home = Path(first.folder).parent
    assert [path.name for path in home.iterdir()] == [Path(first.folder).name]
    assert not (home.parent / "other").exists() or not any((home.parent / "other").iterdir())
    train(tied_backend, model_id)
    second = save(tied_backend, model_id, "s", "sampler_weights")
    assert second.folder != first.folder
    assert not Path(first.folder).exists()


def test_b48_the_learning_rate_is_the_clients_and_the_step_count_of_adam_is_the_checkpoints(
    tied_backend: MilesBackend, model_id: str
) -> None:
    live, resumed = f"{model_id}-live", f"{model_id}-resumed"
    tied_backend.create_adapter(live, ref.spec(2))
    train(tied_backend, live, 3)
    save(tied_backend, live, "three")
    source = CheckpointRef(run_id=live, kind="weights", name="three")
    tied_backend.create_adapter(resumed, ref.spec(2, seed=9))
    tied_backend.load(resumed, source, with_optimizer=True)
    for name in (live, resumed):
        ref.run(tied_backend, ref.item(name, DATA))
        metrics = tied_backend.optim_step(name, replace(ref.ADAM, learning_rate=3e-2))
        assert (metrics["step"], metrics["learning_rate"]) == (4.0, 3e-2)
    assert same(tied_backend, live, resumed)
    for name in (live, resumed):
        tied_backend.unload(name)


def test_what_was_prepared_is_loaded_without_a_look_at_any_file(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(2))
    train(tied_backend, model_id)
    published = save(tied_backend, model_id, "gone")
    before = ref.state_of(tied_backend, model_id)
    source = CheckpointRef(run_id=model_id, kind="weights", name="gone")
    tied_backend.prepare_load(source, with_optimizer=True)
    for path in Path(published.folder).iterdir():
        path.unlink()
    train(tied_backend, model_id)
    tied_backend.load(model_id, source, with_optimizer=True)
    after = ref.state_of(tied_backend, model_id)
    assert all(torch.equal(before.weights[name], after.weights[name]) for name in before.weights)
    assert after.optimizer_step == 1
    with pytest.raises((NotFound, CommandFailed)):
        tied_backend.load(model_id, source, with_optimizer=True)


def test_what_is_prepared_and_never_loaded_is_let_go_of(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(1))
    save(tied_backend, model_id, "x")
    source = CheckpointRef(run_id=model_id, kind="weights", name="x")
    slots = tied_backend.describe().slots
    for _ in range(slots + 3):
        tied_backend.prepare_load(source, with_optimizer=True)
    assert len(tied_backend.ranks.rank._storage._fetched) == slots
    for _ in range(slots):
        tied_backend.load(model_id, source, with_optimizer=True)
    assert tied_backend.ranks.rank._storage._fetched == {}
