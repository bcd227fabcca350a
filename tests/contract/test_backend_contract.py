"""Backend contract: what every trainer does, in this process or behind the bridge."""

import dataclasses

import numpy as np
import pytest
from lilo_definitions import get
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, Destination, WorkItem
from lilo_engine.commands.discovery import find_backend
from lilo_engine.commands.process import start_process
from lilo_engine.errors import LiloError, NotFound, Saturated, UserError
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.losses import LOSSES
from lilo_engine.operations.operation import AdamParams, LoraSpec, ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.tensor import Tensor

SPEC = LoraSpec(
    lora_rank=4, alpha=32.0, seed=7, train_attn=True, train_mlp=True, train_unembed=True
)
ADAM = AdamParams(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
)
SLOTS = 3

IMPLEMENTATIONS = [
    "memory",
    "memory over the bridge",
    pytest.param("miles", marks=pytest.mark.slow),
    pytest.param("miles over the bridge", marks=pytest.mark.slow),
]


def a_definition():
    tiny = get("tiny")
    return tiny.model_copy(update={"lora": tiny.lora.model_copy(update={"slots": SLOTS})})


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def shared_backend(request, tmp_path_factory):
    """One trainer per implementation: starting a real one takes seconds."""
    name, _, bridged = request.param.partition(" over ")
    root = tmp_path_factory.mktemp("backend")
    if bridged:
        process = start_process(
            backend=name,
            definition=a_definition(),
            checkpoints_root=root / "checkpoints",
            log_path=root / "backend.log",
            epoch=1,
        )
        yield process.client
        process.stop()
    else:
        config = BackendConfig(
            definition=a_definition(), checkpoints_root=str(root / "checkpoints"), epoch=1
        )
        backend = find_backend(name)(config)
        yield backend
        backend.close()


@pytest.fixture
def backend(shared_backend):
    """The trainer without models."""
    yield shared_backend
    for name in ("m", "n", "o", "p"):
        shared_backend.unload(ModelId(name))


def a_datum(loss="cross_entropy", n=6, start=10, **inputs):
    targets = [start + i + 1 for i in range(n)]
    given = {name: Tensor.of([0.5] * n, "float32") for name in LOSSES[loss].required}
    if "logprobs" in given:
        given["logprobs"] = Tensor.of([-5.0] * n, "float32")
    given["target_tokens"] = Tensor.of(targets, "int64")
    return Datum(
        tokens=Tensor.of([start + i for i in range(n)], "int32"), loss_inputs={**given, **inputs}
    )


def run(backend, *items, loss="cross_entropy", forward_only=False, config=None):
    """Run (model, datums) pairs in one call."""
    batch = Batch(
        loss=loss,
        config=config or {},
        forward_only=forward_only,
        items=tuple(
            WorkItem(operation_id=f"op-{i}", model_id=ModelId(model), datums=datums)
            for i, (model, datums) in enumerate(items)
        ),
    )
    outputs = backend.forward_backward(batch)
    assert [output.operation_id for output in outputs] == [
        item.operation_id for item in batch.items
    ]
    return outputs


def logprobs(output):
    return np.concatenate([tensor.numpy().reshape(-1) for tensor in output.logprobs])


def look(backend, model="m"):
    """What the model answers now, without training it."""
    return logprobs(run(backend, (model, (a_datum(),)), forward_only=True)[0])


def save(backend, model, name, kind="weights", **fields):
    capture = backend.capture(ModelId(model), "training" if kind == "weights" else "sampler")
    destination = Destination(
        run_id=model, kind=kind, name=name, order=1, overwrite=True, metadata={}
    )
    return backend.persist(capture, dataclasses.replace(destination, **fields))


def test_it_describes_what_it_was_built_from(backend):
    info, definition = backend.describe(), a_definition()
    assert info.base_model == definition.model.name
    assert info.vocab_size == definition.model.vocab_size
    assert info.max_context == definition.context
    assert info.max_rank == definition.lora.max_rank
    assert info.slots == SLOTS
    assert set(info.losses) == set(LOSSES)


def test_the_same_adapter_again_is_nothing_and_another_shape_is_refused(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    backend.create_adapter(ModelId("m"), SPEC)
    with pytest.raises(UserError):
        backend.create_adapter(ModelId("m"), dataclasses.replace(SPEC, lora_rank=8))


def test_slots_are_limited_and_unloading_frees_one(backend):
    for name in ("m", "n", "o"):
        backend.create_adapter(ModelId(name), SPEC)
    with pytest.raises(Saturated):
        backend.create_adapter(ModelId("p"), SPEC)
    backend.unload(ModelId("n"))
    backend.unload(ModelId("n"))
    backend.create_adapter(ModelId("p"), SPEC)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_answers_logprobs_metrics_and_gradients(backend, loss):
    backend.create_adapter(ModelId("m"), SPEC)
    (output,) = run(backend, ("m", (a_datum(loss), a_datum(loss, n=3))), loss=loss)
    assert output.error is None
    assert [tensor.shape for tensor in output.logprobs] == [(6,), (3,)]
    assert all(tensor.dtype == "float32" for tensor in output.logprobs)
    assert "loss:sum" in output.metrics
    assert all(name.count(":") == 1 for name in output.metrics)
    assert np.isfinite(logprobs(output)).all()
    assert backend.optim_step(ModelId("m"), ADAM).get("skipped", 0.0) == 0.0


def test_the_loss_is_a_weighted_sum_over_tokens(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    weights = [1.0, -2.0, 0.0, 0.5, 3.0, 1.0]
    datum = a_datum(weights=Tensor.of(weights, "float32"))
    (output,) = run(backend, ("m", (datum,)), forward_only=True)
    wanted = -float(np.dot(weights, logprobs(output)))
    assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)


def test_several_targets_per_position_answer_in_their_shape(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    targets = np.arange(12).reshape(6, 2)
    datum = a_datum(target_tokens=Tensor.of(targets, "int64"))
    (output,) = run(backend, ("m", (datum,)), forward_only=True)
    assert [tensor.shape for tensor in output.logprobs] == [(6, 2)]


def test_a_step_changes_the_model_and_a_forward_pass_does_not(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    before = look(backend)
    assert np.array_equal(look(backend), before)
    run(backend, ("m", (a_datum(),)))
    assert np.array_equal(look(backend), before)
    backend.optim_step(ModelId("m"), ADAM)
    after = look(backend)
    assert not np.array_equal(after, before)
    assert after.sum() > before.sum()


def test_gradients_add_up_over_calls_and_a_step_clears_them(backend):
    one, two = a_datum(start=10), a_datum(start=90)
    for name in ("m", "n"):
        backend.create_adapter(ModelId(name), SPEC)
    run(backend, ("m", (one,)))
    run(backend, ("m", (two,)))
    run(backend, ("n", (one, two)))
    for name in ("m", "n"):
        backend.optim_step(ModelId(name), ADAM)
    assert look(backend, "m") == pytest.approx(look(backend, "n"), abs=1e-5)
    run(backend, ("m", (one,)))
    backend.optim_step(ModelId("m"), ADAM)
    run(backend, ("n", (one,)))
    backend.optim_step(ModelId("n"), ADAM)
    assert look(backend, "m") == pytest.approx(look(backend, "n"), abs=1e-5)


def test_dropped_gradients_are_not_used(backend):
    for name in ("m", "n"):
        backend.create_adapter(ModelId(name), SPEC)
    run(backend, ("m", (a_datum(start=90),)))
    backend.drop_gradients(ModelId("m"))
    for name in ("m", "n"):
        run(backend, (name, (a_datum(),)))
        backend.optim_step(ModelId(name), ADAM)
    assert np.array_equal(look(backend, "m"), look(backend, "n"))


def test_models_in_one_call_get_the_numbers_they_get_alone(backend):
    for name in ("m", "n"):
        backend.create_adapter(ModelId(name), SPEC)
    run(backend, ("n", (a_datum(start=40),)))
    backend.optim_step(ModelId("n"), ADAM)
    alone = [look(backend, name) for name in ("m", "n")]
    outputs = run(
        backend, ("m", (a_datum(),)), ("n", (a_datum(),)), ("m", (a_datum(),)), forward_only=True
    )
    assert np.array_equal(logprobs(outputs[0]), alone[0])
    assert np.array_equal(logprobs(outputs[1]), alone[1])
    assert np.array_equal(logprobs(outputs[2]), alone[0])


def test_a_step_touches_one_model_only(backend):
    for name in ("m", "n"):
        backend.create_adapter(ModelId(name), SPEC)
        run(backend, (name, (a_datum(),)))
    before = look(backend, "n")
    backend.optim_step(ModelId("m"), ADAM)
    assert np.array_equal(look(backend, "n"), before)


def test_an_item_that_is_not_finite_fails_alone(backend):
    for name in ("m", "n", "o"):
        backend.create_adapter(ModelId(name), SPEC)
    bad = a_datum("importance_sampling", logprobs=Tensor.of([-3e38] * 6, "float32"))
    good = a_datum("importance_sampling")
    outputs = run(backend, ("m", (bad,)), ("n", (good,)), loss="importance_sampling")
    (alone,) = run(backend, ("o", (good,)), loss="importance_sampling")
    assert outputs[0].error is not None
    assert outputs[1].error is None
    assert np.array_equal(logprobs(outputs[1]), logprobs(alone))
    for name in ("n", "o"):
        backend.optim_step(ModelId(name), ADAM)
    assert np.array_equal(look(backend, "n"), look(backend, "o"))
    assert np.isfinite(look(backend, "m")).all()


def test_seeds_decide_the_first_weights(backend):
    for name, seed in (("m", 1), ("n", 1), ("o", 2)):
        backend.create_adapter(ModelId(name), dataclasses.replace(SPEC, seed=seed))
        run(backend, (name, (a_datum(),)))
        backend.optim_step(ModelId(name), ADAM)
    assert np.array_equal(look(backend, "m"), look(backend, "n"))
    assert not np.array_equal(look(backend, "m"), look(backend, "o"))


def test_a_checkpoint_brings_the_weights_and_the_optimizer_back(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    run(backend, ("m", (a_datum(),)))
    backend.optim_step(ModelId("m"), ADAM)
    published = save(backend, "m", "one")
    assert published.size_bytes > 0
    saved = look(backend)
    run(backend, ("m", (a_datum(start=30),)))
    backend.optim_step(ModelId("m"), ADAM)
    backend.create_adapter(ModelId("n"), dataclasses.replace(SPEC, seed=99))
    ref = CheckpointRef(run_id="m", kind="weights", name="one")
    backend.load(ModelId("n"), ref, with_optimizer=True)
    assert np.array_equal(look(backend, "n"), saved)
    run(backend, ("n", (a_datum(start=30),)))
    backend.optim_step(ModelId("n"), ADAM)
    assert np.array_equal(look(backend, "n"), look(backend, "m"))


def test_a_capture_is_not_changed_by_later_training(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    before = look(backend)
    capture = backend.capture(ModelId("m"), "training")
    run(backend, ("m", (a_datum(),)))
    backend.optim_step(ModelId("m"), ADAM)
    backend.persist(
        capture, Destination(run_id="m", kind="weights", name="cap", order=1, overwrite=True)
    )
    ref = CheckpointRef(run_id="m", kind="weights", name="cap")
    backend.load(ModelId("m"), ref, with_optimizer=False)
    assert np.array_equal(look(backend), before)


def test_a_capture_is_persisted_once_and_a_second_time_concerns_that_command_only(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    capture = backend.capture(ModelId("m"), "training")
    destination = Destination(run_id="m", kind="weights", name="once", order=1, overwrite=True)
    backend.persist(capture, destination)
    with pytest.raises(NotFound):
        backend.persist(capture, destination)
    look(backend)


def test_a_load_drops_gradients(backend):
    for name in ("m", "n"):
        backend.create_adapter(ModelId(name), SPEC)
    save(backend, "m", "fresh")
    run(backend, ("m", (a_datum(start=90),)))
    ref = CheckpointRef(run_id="m", kind="weights", name="fresh")
    backend.load(ModelId("m"), ref, with_optimizer=False)
    for name in ("m", "n"):
        run(backend, (name, (a_datum(),)))
        backend.optim_step(ModelId(name), ADAM)
    assert np.array_equal(look(backend, "m"), look(backend, "n"))


def test_a_load_can_be_prepared_beside_the_gpu_lane(backend):
    for name in ("m", "n"):
        backend.create_adapter(ModelId(name), SPEC)
    run(backend, ("m", (a_datum(),)))
    backend.optim_step(ModelId("m"), ADAM)
    save(backend, "m", "prepared")
    ref = CheckpointRef(run_id="m", kind="weights", name="prepared")
    for _ in range(2):
        backend.prepare_load(ref, with_optimizer=True)
        backend.load(ModelId("n"), ref, with_optimizer=True)
        assert np.array_equal(look(backend, "m"), look(backend, "n"))
    nowhere = CheckpointRef(run_id="m", kind="weights", name="nowhere")
    with pytest.raises(NotFound):
        backend.prepare_load(nowhere, with_optimizer=True)


def test_a_missing_checkpoint_and_one_that_does_not_fit_are_the_users_mistakes(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    backend.create_adapter(ModelId("n"), dataclasses.replace(SPEC, lora_rank=2))
    nowhere = CheckpointRef(run_id="m", kind="weights", name="nowhere")
    with pytest.raises(NotFound):
        backend.load(ModelId("m"), nowhere, with_optimizer=True)
    save(backend, "m", "four")
    ref = CheckpointRef(run_id="m", kind="weights", name="four")
    with pytest.raises(UserError):
        backend.load(ModelId("n"), ref, with_optimizer=True)
    look(backend, "n")


def test_a_taken_name_is_refused_and_the_trainer_goes_on(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    save(backend, "m", "taken")
    with pytest.raises(UserError):
        save(backend, "m", "taken", overwrite=False)
    save(backend, "m", "taken", kind="sampler_weights")


def test_a_model_that_is_not_resident_concerns_its_own_item_or_command_only(backend):
    backend.create_adapter(ModelId("m"), SPEC)
    outputs = run(backend, ("nobody", (a_datum(),)), ("m", (a_datum(),)), forward_only=True)
    assert outputs[0].error is not None
    assert np.array_equal(logprobs(outputs[1]), look(backend))
    with pytest.raises(LiloError):
        backend.optim_step(ModelId("nobody"), ADAM)
    with pytest.raises(LiloError):
        backend.capture(ModelId("nobody"), "training")
    look(backend)


def test_health_counts_commands(backend):
    before = backend.health()
    backend.create_adapter(ModelId("m"), SPEC)
    after = backend.health()
    assert after.completed_commands > before.completed_commands
    assert (after.last_completed or "").startswith("create_adapter")
    assert len(after.ranks) >= 1
