"""MilesBackend as the engine sees it: adapters, items, windows, refusals, captures."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lilo_definitions import Definition, Topology, architecture_of, get
from lilo_engine.commands.command import Destination
from lilo_engine.errors import InvalidRequest, NotFound, Saturated, UserError
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.tensor import Tensor
from lilo_miles_backend import MilesBackend
from safetensors.torch import load_file

from tests.miles_backend import reference as ref


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, lilo_miles_backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_it_describes_what_the_definition_says(tiny_backend: MilesBackend) -> None:
    info = tiny_backend.describe()
    definition = get("tiny")
    assert info.base_model == "tiny"
    assert info.vocab_size == definition.model.vocab_size
    assert info.slots == definition.lora.slots
    assert info.target_groups == ("attn", "mlp", "unembed")
    assert set(info.losses) == {
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
    }
    assert info.device.startswith("cpu")
    assert tiny_backend.ranks.info()[0].attention == "aten flash for CPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_definition_for_a_gpu_is_refused_with_what_was_found_and_what_to_do() -> None:
    topology = Topology(device="cuda", gpus_per_node=1)
    with pytest.raises(InvalidRequest, match=r"needs a GPU .*, and 0 can be used: .*; \w+ .*, or"):
        ref.start(get("tiny").model_copy(update={"topology": topology}))


def test_what_is_not_built_for_gpus_is_refused_by_name_before_anything_starts() -> None:
    definition = get("tiny").derive(
        topology={"device": "cuda", "gpus_per_node": 1}, trainer={"deterministic": True}
    )
    with pytest.raises(InvalidRequest, match=r"trainer\.deterministic is True"):
        ref.start(definition)


def test_a_definition_that_does_not_fit_the_files_is_refused(
    random_models: dict[str, Definition],
) -> None:
    definition = random_models["tied"]
    model = definition.model.model_copy(update={"vocab_size": 96})
    with pytest.raises(InvalidRequest):
        ref.start(definition.model_copy(update={"model": model}))


def test_missing_unexpected_and_misshapen_weights_are_refused(
    random_models: dict[str, Definition], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    definition = random_models["untied"]
    source = Path(definition.model.source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "missing": {k: v for k, v in tensors.items() if k != name},
        "unexpected": {**tensors, "model.layers.1.mlp.extra.weight": torch.zeros(2)},
        "misshapen": {**tensors, name: tensors[name][:-1].contiguous()},
    }
    for case, content in cases.items():
        folder = tmp_path / case
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        model = definition.model.model_copy(update={"source": str(folder)})
        with pytest.raises(InvalidRequest):
            ref.start(definition.model_copy(update={"model": model}))


def test_equal_seeds_give_equal_adapters_and_b_starts_at_zero(
    tied_backend: MilesBackend, model_id: str
) -> None:
    names = [f"{model_id}-{i}" for i in range(4)]
    tied_backend.create_adapter(names[0], ref.spec(4, seed=7))
    tied_backend.create_adapter(names[1], ref.spec(4, seed=7, mlp=False))
    tied_backend.create_adapter(names[2], ref.spec(4, seed=8))
    tied_backend.create_adapter(names[3], ref.spec(4, seed=None))
    states = [ref.state_of(tied_backend, name) for name in names]
    for name in names:
        tied_backend.unload(name)

    for name, tensor in states[1].weights.items():  # seeds count per module, not per adapter
        assert torch.equal(tensor, states[0].weights[name])
    a = "model.layers.0.self_attn.q_proj.lora_A"
    assert not torch.equal(states[0].weights[a], states[2].weights[a])
    assert not torch.equal(states[0].weights[a], states[3].weights[a])
    assert states[3].spec.seed is not None
    assert all(not t.any() for n, t in states[0].weights.items() if n.endswith("lora_B"))
    # Kaiming uniform: within 1/sqrt(in), and filling it.
    bound = 1 / math.sqrt(states[0].weights[a].shape[1])
    assert 0.8 * bound < float(states[0].weights[a].abs().max()) <= bound


@pytest.mark.parametrize(
    "spec",
    [
        ref.spec(0),
        ref.spec(33),
        ref.spec(4, alpha=0.0),
        ref.spec(4, attn=False, mlp=False, unembed=False),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused(
    tied_backend: MilesBackend, model_id: str, spec: LoraSpec
) -> None:
    with pytest.raises(UserError):
        tied_backend.create_adapter(model_id, spec)


@pytest.mark.parametrize("lora_rank", [1, 32])
def test_the_smallest_and_largest_rank_train(
    tied_backend: MilesBackend, model_id: str, lora_rank: int
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(lora_rank))
    one = ref.datum(8, np.random.default_rng(0), vocab=97)
    losses: list[float] = []
    for _ in range(5):
        (output,) = ref.run(tied_backend, ref.item(model_id, [one]))
        losses.append(output.metrics["loss:sum"])
        tied_backend.optim_step(model_id, replace(ref.ADAM, learning_rate=1e-2))
    assert losses[-1] < 0.9 * losses[0]
    shapes = {
        t.shape
        for n, t in ref.state_of(tied_backend, model_id).weights.items()
        if n.endswith("lora_A")
    }
    assert {shape[0] for shape in shapes} == {lora_rank}


def test_the_same_spec_again_does_nothing_and_another_is_refused(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4, seed=None))
    before = ref.state_of(tied_backend, model_id).weights
    tied_backend.create_adapter(model_id, ref.spec(4, seed=None))
    after = ref.state_of(tied_backend, model_id).weights
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError):
        tied_backend.create_adapter(model_id, ref.spec(8, seed=None))


def test_slots_run_out_and_come_back_with_fresh_state(
    untied_backend: MilesBackend, random_models: dict[str, Definition]
) -> None:
    slots = random_models["untied"].lora.slots
    names = [f"slot-{i}" for i in range(slots)]
    one = ref.datum(4, np.random.default_rng(1), vocab=97)
    try:
        for name in names:
            untied_backend.create_adapter(name, ref.spec(1, seed=5))
        with pytest.raises(Saturated):
            untied_backend.create_adapter("one-too-many", ref.spec(1))
        fresh = ref.state_of(untied_backend, names[0]).weights
        ref.run(untied_backend, ref.item(names[3], [one]))
        untied_backend.optim_step(names[3], ref.ADAM)
        ref.run(untied_backend, ref.item(names[3], [one]))

        untied_backend.unload(names[3])
        untied_backend.create_adapter("successor", ref.spec(1, seed=5))

        state = ref.state_of(untied_backend, "successor")
        assert all(torch.equal(state.weights[name], fresh[name]) for name in fresh)
        assert state.optimizer_step == 0
        with pytest.raises(InvalidRequest):  # no gradients of the former holder
            untied_backend.optim_step("successor", ref.ADAM)
        (output,) = ref.run(untied_backend, ref.item(names[3], [one]))
        assert output.error is not None  # unloaded
    finally:
        for name in [*names, "successor", "one-too-many"]:
            untied_backend.unload(name)


def test_a_definition_without_unembed_trains_the_rest(
    random_models: dict[str, Definition], model_id: str
) -> None:
    definition = random_models["tied"]
    lora = definition.lora.model_copy(update={"targets": ("attn",)})
    backend = ref.start(definition.model_copy(update={"lora": lora}))
    try:
        backend.create_adapter(model_id, ref.spec(2, mlp=False))
        assert "lm_head.lora_A" not in ref.state_of(backend, model_id).weights
        with pytest.raises(InvalidRequest):
            backend.create_adapter("other", ref.spec(2))  # the mlp flag cannot be honoured
    finally:
        backend.close()


def test_passes_accumulate_and_forward_leaves_gradients_alone(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    rng = np.random.default_rng(2)
    first, second = ref.ragged((5, 3), rng, vocab=97), ref.ragged((7,), rng, vocab=97)
    one = ref.item(model_id, first)
    ref.run(tied_backend, one)
    alone = ref.gradients_of(tied_backend, model_id)
    (forward,) = ref.run(tied_backend, ref.item(model_id, second), forward_only=True)
    unchanged = ref.gradients_of(tied_backend, model_id)
    assert all(torch.equal(alone[name], unchanged[name]) for name in alone)

    (backward,) = ref.run(tied_backend, ref.item(model_id, second))

    assert ref.numbers(forward) == ref.numbers(backward)
    both = ref.gradients_of(tied_backend, model_id)
    tied_backend.drop_gradients(model_id)
    ref.run(tied_backend, ref.item(model_id, second))
    other = ref.gradients_of(tied_backend, model_id)
    assert ref.worst(both, {name: alone[name] + other[name] for name in alone}) <= 1e-5


def test_forward_alone_gives_no_gradients_to_step_with(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    one = ref.datum(5, np.random.default_rng(3), vocab=97)
    ref.run(tied_backend, ref.item(model_id, [one]), forward_only=True)
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)


def test_items_batched_together_are_bit_for_bit_those_run_alone(
    tied_backend: MilesBackend, model_id: str
) -> None:
    rng = np.random.default_rng(4)
    names = [f"{model_id}-{key}" for key in "abc"]
    data = [ref.ragged(lengths, rng, vocab=97) for lengths in ((1, 2, 17, 128), (17,), (3, 60))]
    for number, name in enumerate(names):
        tied_backend.create_adapter(name, ref.spec(2 + number, seed=number))
        ref.randomize(tied_backend, name, seed=number)
    items = [ref.item(n, d, f"op-{n}") for n, d in zip(names, data, strict=True)]

    together = ref.run(tied_backend, *items)
    gradients = [ref.gradients_of(tied_backend, name) for name in names]
    for index, name in enumerate(names):
        tied_backend.drop_gradients(name)
        (alone,) = ref.run(tied_backend, items[index])
        assert ref.numbers(alone) == ref.numbers(together[index])
        again = ref.gradients_of(tied_backend, name)
        assert all(torch.equal(again[key], gradients[index][key]) for key in again)
        tied_backend.unload(name)


def test_every_row_of_a_ragged_batch_gets_its_own_logprobs_in_order(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(4))
    ref.randomize(tied_backend, model_id)
    datums = ref.ragged((17, 1, 128, 2, 17), np.random.default_rng(5), vocab=97)
    (together,) = ref.run(tied_backend, ref.item(model_id, datums), forward_only=True)
    for one, ours in zip(datums, together.logprobs, strict=True):
        (alone,) = ref.run(tied_backend, ref.item(model_id, [one]), forward_only=True)
        assert ours.shape == (one.num_tokens,)
        assert np.abs(ours.numpy() - alone.logprobs[0].numpy()).max() <= 1e-5


def test_a_batch_over_the_token_limit_is_cut_and_gives_the_same_numbers(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    definition = random_models["tied"]
    limits = definition.limits.model_copy(update={"max_tokens_per_rank": 20})
    narrow = ref.start(definition.model_copy(update={"limits": limits}))
    datums = ref.ragged((3, 17, 40, 8, 2), np.random.default_rng(6), vocab=97)
    try:
        outputs = []
        for backend in (narrow, tied_backend):
            backend.create_adapter(model_id, ref.spec(4))
            ref.randomize(backend, model_id)
            outputs += ref.run(backend, ref.item(model_id, datums))
        for ours, theirs in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
            assert np.abs(ours.numpy() - theirs.numpy()).max() <= 1e-5
        gradients = [ref.gradients_of(backend, model_id) for backend in (narrow, tied_backend)]
        assert ref.worst(*gradients) <= 1e-5
        # 40 alone, 17 with 3, 8 with 2: three microbatches with room for 20 each.
        assert outputs[0].metrics["microbatch_fill:mean"] == pytest.approx(70 / 60)
    finally:
        narrow.close()


def test_a_pass_says_what_it_took(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(2))
    datums = ref.ragged((4, 20), np.random.default_rng(7), vocab=97)
    started = time.perf_counter()
    (output,) = ref.run(tied_backend, ref.item(model_id, datums))
    wall_s = time.perf_counter() - started
    (forward,) = ref.run(tied_backend, ref.item(model_id, datums), forward_only=True)

    metrics = output.metrics
    assert all(name.count(":") == 1 for name in metrics)
    assert metrics["tokens:sum"] == metrics["padded_tokens:sum"] == 24.0
    limit = random_models["tied"].limits.max_tokens_per_rank
    assert metrics["microbatch_fill:mean"] == pytest.approx(24 / limit)
    assert 0 < metrics["seconds:sum"] <= wall_s
    model = architecture_of(random_models["tied"])
    linears = 2 * 24 * (model.layer_weights + model.head_weights)
    scores = 2 * model.layers * model.attention_width * (4**2 + 20**2)
    assert forward.metrics["model_flops:sum"] == linears + scores
    assert metrics["model_flops:sum"] == 2 * linears + 3 * scores
    speed = metrics["model_flops:sum"] / metrics["seconds:sum"]
    assert metrics["model_flops_per_s_per_rank:mean"] == pytest.approx(speed)
    assert metrics["peak_memory_bytes:max"] > 10e6  # torch alone is more
    assert "utilisation:mean" not in metrics  # nobody knows this CPU's peak


def _bad_items(model_id: str) -> dict[str, ref.Datum]:
    one = ref.datum(4, np.random.default_rng(8), vocab=97, weights=np.ones(4))
    inputs = dict(one.loss_inputs)
    return {
        "nan weight": ref.Datum(
            tokens=one.tokens,
            loss_inputs={**inputs, "weights": Tensor.of([1, math.nan, 1, 1], "float32")},
        ),
        "target out of range": ref.Datum(
            tokens=one.tokens,
            loss_inputs={**inputs, "target_tokens": Tensor.of([1, 2, 97, 3], "int64")},
        ),
        "token out of range": ref.Datum(
            tokens=Tensor.of([1, -1, 2, 3], "int32"), loss_inputs=inputs
        ),
        "too few weights": ref.Datum(
            tokens=one.tokens, loss_inputs={**inputs, "weights": Tensor.of([1.0], "float32")}
        ),
        "too long": ref.datum(257, np.random.default_rng(9), vocab=97),
        "unknown input": ref.Datum(
            tokens=one.tokens, loss_inputs={**inputs, "advantages": inputs["weights"]}
        ),
    }


@pytest.mark.parametrize("case", list(_bad_items("")))
def test_a_bad_item_fails_alone_and_drops_only_its_models_window(
    tied_backend: MilesBackend, model_id: str, case: str
) -> None:
    bad, good = f"{model_id}-bad", f"{model_id}-good"
    rng = np.random.default_rng(10)
    data = ref.ragged((6, 9), rng, vocab=97)
    for name in (bad, good):
        tied_backend.create_adapter(name, ref.spec(3))
        ref.randomize(tied_backend, name)
    ref.run(tied_backend, ref.item(good, data))
    expected = ref.gradients_of(tied_backend, good)
    tied_backend.drop_gradients(good)
    ref.run(tied_backend, ref.item(bad, data))  # a window that the failure must end

    outputs = ref.run(
        tied_backend, ref.item(bad, [_bad_items(bad)[case]], "bad"), ref.item(good, data, "good")
    )

    assert outputs[0].error
    assert outputs[1].error is None
    found = ref.gradients_of(tied_backend, good)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(bad, ref.ADAM)
    ref.run(tied_backend, ref.item(bad, data))
    assert tied_backend.optim_step(bad, ref.ADAM)["skipped"] == 0.0
    for name in (bad, good):
        tied_backend.unload(name)


def test_a_loss_that_overflows_is_an_error_of_its_item(
    tied_backend: MilesBackend, model_id: str
) -> None:
    tied_backend.create_adapter(model_id, ref.spec(3))
    one = ref.datum(
        3,
        np.random.default_rng(11),
        vocab=97,
        logprobs=[-1.0, -2e4, -1.0],
        advantages=[1.0, 1.0, 1.0],
    )
    (output,) = ref.run(tied_backend, ref.item(model_id, [one]), loss="importance_sampling")
    assert output.error is not None
    with pytest.raises(InvalidRequest):
        tied_backend.optim_step(model_id, ref.ADAM)


def test_an_item_of_an_unknown_model_is_an_error_of_that_item(tied_backend: MilesBackend) -> None:
    one = ref.datum(3, np.random.default_rng(12), vocab=97)
    (output,) = ref.run(tied_backend, ref.item("nobody", [one]))
    assert output.error is not None
    tied_backend.unload("nobody")


def test_health_counts_commands_of_driver_and_rank(
    tied_backend: MilesBackend, model_id: str
) -> None:
    before = tied_backend.health()
    tied_backend.create_adapter(model_id, ref.spec(2))
    after = tied_backend.health()
    assert after.completed_commands == before.completed_commands + 1
    assert after.ranks[0].completed_commands == before.ranks[0].completed_commands + 1
    assert after.ranks[0].running is None
    assert after.last_completed is not None
    assert after.age_s < 60


# Captures and checkpoints, through the backend


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


def test_bfloat16_base_weights_train_float32_adapters_close_to_float32(
    random_models: dict[str, Definition], tied_backend: MilesBackend, model_id: str
) -> None:
    half = ref.start(random_models["tied"].model_copy(update={"dtype": "bfloat16"}))
    datums = ref.ragged((5, 30), np.random.default_rng(15), vocab=97)
    try:
        outputs = []
        for backend in (half, tied_backend):
            backend.create_adapter(model_id, ref.spec(4))
            ref.randomize(backend, model_id)
            outputs += ref.run(backend, ref.item(model_id, datums))
        assert outputs[0].error is None
        for ours, theirs in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
            # Eight bits of mantissa over a few layers, on logits of size ten.
            assert np.abs(ours.numpy() - theirs.numpy()).max() <= 0.5
        gradients = ref.gradients_of(half, model_id)
        assert all(tensor.dtype == torch.float32 for tensor in gradients.values())
        assert ref.worst(gradients, ref.gradients_of(tied_backend, model_id)) <= 0.25
        assert half.optim_step(model_id, ref.ADAM)["skipped"] == 0.0
    finally:
        half.close()
