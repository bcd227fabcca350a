"""Faults B13 to B19 that others met with many adapters on one trainer, each tried here through the SDK; named after them.

The trainer is the real one, in a process of its own. Equal seeds give equal adapters, so that a model which trained
alone is the reference, bit for bit, of one that trained in company.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from lilo_definitions import Definition, get
from lilo_engine.commands.launcher import ProcessLauncher
from lilo_engine.config import DataFolder
from lilo_engine.requests.front import FrontSettings
from lilo_volume import LocalVolume, open_named
from safetensors.numpy import load_file
from tinker import types

from tests.conformance.conftest import KEY, Served, serve
from tests.conformance.test_ten_facts import example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ALPHA = get("tiny").lora.alpha
SLOTS = 6
BATCH = [example([1, 50, 60, 70, 80]), example([9, 8, 7])]
OTHER = [example([200, 100, 50, 25])]
LIMIT_S = 60
WEIGHT = "adapter_model.safetensors"
GROUPS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "unembed": ("lm_head",),
}


def real_trainer(definition: Definition, data: DataFolder) -> ProcessLauncher:
    return ProcessLauncher(
        definition=definition,
        checkpoints_root=data.checkpoints,
        log_path=data.logs / "backend.log",
    )


def serve_real(folder: Path, **lora: object) -> Iterator[Served]:
    definition = get("tiny").derive(lora={"slots": SLOTS, **lora})
    yield from serve(folder, FrontSettings(), definition=definition, launcher=real_trainer)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve_real(tmp_path_factory.mktemp("real"))


@pytest.fixture
def session(real: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Makes service clients; their models end with the test, and free their slots."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    made: list[tinker.ServiceClient] = []

    def make() -> tinker.ServiceClient:
        made.append(tinker.ServiceClient(base_url=real.url, api_key=KEY))
        return made[-1]

    yield make
    for service in made:
        close(service)


def close(service: tinker.ServiceClient) -> None:
    service.close("success").result(timeout=LIMIT_S)


def client_of(service: tinker.ServiceClient, **options: object) -> tinker.TrainingClient:
    given = {"rank": 4, "seed": 1, **options}
    return service.create_lora_training_client("tiny", **given).result(timeout=LIMIT_S)


def adam(rate: float = 1e-2, **options: object) -> types.AdamParams:
    return types.AdamParams(learning_rate=rate, **options)


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    """What a pass says of the model, and not of how long it took or what memory the trainer has."""
    return {name: metrics[name] for name in ("loss:sum", "tokens:sum")}


def passed(client: tinker.TrainingClient, batch=BATCH) -> dict[str, float]:
    result = client.forward_backward(batch, "cross_entropy").result(timeout=LIMIT_S)
    return numbers(result.metrics)


def stepped(client: tinker.TrainingClient, params=None) -> dict[str, float]:
    return client.optim_step(params or adam()).result(timeout=LIMIT_S).metrics


def scores(client: tinker.TrainingClient, batch=BATCH) -> list[list[float]]:
    answer = client.forward(batch, "cross_entropy").result(timeout=LIMIT_S)
    return [output["logprobs"].tolist() for output in answer.loss_fn_outputs]


def files_of(served: Served, path: str, pattern: str) -> list[Path]:
    """Files of a published checkpoint."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    volume = LocalVolume(served.data_dir / "checkpoints")
    folder = Path(open_named(volume, run_id, kind, name).folder)
    return sorted(folder.rglob(pattern))


def adapter_of(
    served: Served, client: tinker.TrainingClient, name: str
) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Tensors and configuration of what is published for sampling."""
    path = client.save_weights_for_sampler(name).result(timeout=LIMIT_S).path
    (tensors,) = files_of(served, path, WEIGHT)
    (config,) = files_of(served, path, "adapter_config.json")
    return load_file(tensors), json.loads(config.read_text())


# B13: the step takes whichever adapter is active.


def alone(session, seed: int, params: types.AdamParams, batch) -> tuple[object, ...]:
    """What a pass and a step give to a model that is alone, and its scores after them."""
    service = session()
    client = client_of(service, seed=seed)
    result = (passed(client, batch), stepped(client, params), scores(client, batch))
    close(service)
    return result


ORDERS = [
    order
    for order in itertools.permutations(("pass a", "step a", "pass b", "step b"))
    if order.index("pass a") < order.index("step a")
    and order.index("pass b") < order.index("step b")
]


def test_b13_steps_and_passes_of_two_models_in_all_orders_equal_those_alone(session):
    settings = {
        "a": (11, adam(1e-2, grad_clip_norm=0.1), BATCH),
        "b": (12, adam(3e-3), OTHER),
    }
    expected = {name: alone(session, *fields) for name, fields in settings.items()}
    assert len(ORDERS) == 6
    for order in ORDERS:
        service = session()
        clients = {name: client_of(service, seed=settings[name][0]) for name in "ab"}
        got: dict[str, list[object]] = {"a": [], "b": []}
        for verb, name in (event.split() for event in order):
            _, params, batch = settings[name]
            client = clients[name]
            got[name].append(passed(client, batch) if verb == "pass" else stepped(client, params))
        for name, client in clients.items():
            result = (*got[name], scores(client, settings[name][2]))
            assert result == expected[name], f"model {name} in the order {order}"
        close(service)


# B14: loading or removing one adapter touches the others.


def test_b14_small_updates_survive_the_coming_and_going_of_others_bit_for_bit(real, session):
    def trained(disturbed: bool) -> list[bytes]:
        service = session()
        client = client_of(service, seed=5)
        for _ in range(3):
            passed(client)
            stepped(client, adam(1e-6))
            if disturbed:
                other = session()
                passed(client_of(other, seed=6, rank=8), OTHER)
                close(other)
        path = client.save_state("kept").result(timeout=LIMIT_S).path
        shards = [file.read_bytes() for file in files_of(real, path, "*.distcp")]
        close(service)
        return shards

    expected = trained(disturbed=False)
    assert sum(map(len, expected)) > 10_000
    assert trained(disturbed=True) == expected


# B15: one number that is not finite.


@pytest.mark.parametrize("weight", [1e38, float("3e38")], ids=["1e38", "3e38"])
def test_b15_a_pass_that_overflows_fails_alone_and_leaves_its_model_usable(session, weight):
    expected = alone(session, 22, adam(), OTHER)
    service = session()
    bad, good = client_of(service, seed=21), client_of(service, seed=22)
    before = scores(bad)
    huge = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData([2, 3, 4], "int64", [3]),
            "weights": types.TensorData([weight] * 3, "float32", [3]),
        },
    )
    # Sent together, so that they share a command.
    futures = [
        bad.forward_backward([huge], "cross_entropy"),
        good.forward_backward(OTHER, "cross_entropy"),
    ]
    gave = numbers(futures[1].result(timeout=LIMIT_S).metrics)
    skipped = outcome(futures[0], bad)
    assert skipped, "a step was done with gradients that are not finite"
    assert (gave, stepped(good), scores(good, OTHER)) == expected
    # Its weights are untouched, and the next window is a clean one.
    assert scores(bad) == before
    passed(bad)
    assert stepped(bad)["skipped"] == 0.0
    assert np.isfinite(scores(bad)[0]).all()
    close(service)


def outcome(future: object, client: tinker.TrainingClient) -> bool:
    """Whether nothing of a pass was used: it failed and its step was refused, or its step was skipped."""
    try:
        future.result(timeout=LIMIT_S)
    except tinker.RequestFailedError:
        with pytest.raises(tinker.RequestFailedError, match="dropped"):
            stepped(client)
        return True
    return stepped(client)["skipped"] == 1.0


def test_b15_an_advantage_that_is_no_number_is_refused_before_it_reaches_a_device(session):
    service = session()
    client = client_of(service)
    before = scores(client)
    with pytest.raises(tinker.RequestFailedError, match="advantages"):
        client.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints([1, 2]),
                    loss_fn_inputs={
                        "target_tokens": types.TensorData([2, 3], "int64", [2]),
                        "logprobs": types.TensorData([-1.0, -1.0], "float32", [2]),
                        "advantages": types.TensorData([float("inf"), 1.0], "float32", [2]),
                    },
                )
            ],
            "importance_sampling",
        ).result(timeout=LIMIT_S)
    assert scores(client) == before


# B16: a failed creation leaks.


def test_b16_creations_that_fail_midway_leave_no_slot_behind(real, session):
    service = session()
    client = client_of(service)
    passed(client), stepped(client)
    path = client.save_state("damaged").result(timeout=LIMIT_S).path
    shard = files_of(real, path, "*.distcp")[0]
    whole = shard.read_bytes()
    shard.chmod(0o600)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(SLOTS):
        with pytest.raises(tinker.RequestFailedError, match="damaged"):
            service.create_training_client_from_state(path).result(timeout=LIMIT_S)
    shard.write_bytes(whole)
    # Every slot but the first client's is free: none of these waits.
    restored = service.create_training_client_from_state(path).result(timeout=LIMIT_S)
    assert scores(restored) == scores(client)
    for seed in range(SLOTS - 2):
        client_of(service, seed=seed)


# B17: alpha missing means zero.


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_b17_the_scale_is_alpha_over_rank_in_training_and_in_what_is_published(real, session, rank):
    client = client_of(session(), rank=rank)
    passed(client)
    assert stepped(client)["grad_norm"] > 0
    tensors, config = adapter_of(real, client, f"rank-{rank}")
    assert (config["r"], config["lora_alpha"]) == (rank, ALPHA)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            assert np.abs(tensor).max() > 0, f"{name} learnt nothing"


# B18: what was saved under one shape and loaded under another.


def test_b18_a_state_is_restored_in_another_session_exactly_as_it_was_saved(session):
    first = session()
    client = client_of(first, rank=8, train_mlp=False, train_unembed=False)
    passed(client), stepped(client)
    path = client.save_state("attn").result(timeout=LIMIT_S).path
    second = session()
    restored = second.create_training_client_from_state_with_optimizer(path)
    restored = restored.result(timeout=LIMIT_S)
    assert restored.get_info().model_data is not None
    assert scores(restored) == scores(client)
    assert (passed(restored), stepped(restored)) == (passed(client), stepped(client))


def test_b18_a_state_of_another_shape_is_refused_in_place_naming_both(session):
    service = session()
    attn = client_of(service, rank=8, train_mlp=False, train_unembed=False)
    path = attn.save_state("only-attn").result(timeout=LIMIT_S).path
    both = client_of(service, rank=4)
    before = scores(both)
    with pytest.warns(FutureWarning, match="load_state"):
        loading = both.load_state(path)
    with pytest.raises(tinker.RequestFailedError) as refused:
        loading.result(timeout=LIMIT_S)
    assert "8" in str(refused.value)
    assert "4" in str(refused.value)
    assert scores(both) == before


def test_b18_a_server_with_another_alpha_restores_with_the_checkpoints_own(real, session, tmp_path):
    client = client_of(session(), rank=8)
    passed(client), stepped(client)
    path = client.save_state("alpha").result(timeout=LIMIT_S).path
    expected = scores(client)
    shutil.copytree(real.data_dir / "checkpoints", tmp_path / "checkpoints")
    for other in serve_real(tmp_path, alpha=2 * ALPHA):
        service = tinker.ServiceClient(base_url=other.url, api_key=KEY)
        restored = service.create_training_client_from_state(path).result(timeout=LIMIT_S)
        assert scores(restored) == expected
        assert adapter_of(other, restored, "again")[1]["lora_alpha"] == ALPHA
        fresh = client_of(service, rank=8)
        assert adapter_of(other, fresh, "fresh")[1]["lora_alpha"] == 2 * ALPHA
        close(service)


# B19: settings that have no effect.


@pytest.mark.parametrize("group", GROUPS)
def test_b19_a_flag_alone_trains_exactly_its_modules(real, session, group):
    flags = {f"train_{name}": name == group for name in GROUPS}
    client = client_of(session(), **flags)
    passed(client), stepped(client)
    tensors, config = adapter_of(real, client, f"only-{group}")
    modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors}
    assert modules == set(GROUPS[group])
    assert set(config["target_modules"]) <= set(GROUPS[group])


def test_b19_equal_seeds_give_equal_first_weights_and_others_do_not(real, session):
    service = session()
    first, same, other = (client_of(service, seed=seed) for seed in (7, 7, 8))
    tensors = [
        adapter_of(real, client, f"seed-{number}")[0]
        for number, client in enumerate((first, same, other))
    ]
    for name in tensors[0]:
        assert np.array_equal(tensors[0][name], tensors[1][name])
        if "lora_A" in name:
            assert not np.array_equal(tensors[0][name], tensors[2][name])


def test_b19_a_rank_that_is_not_offered_is_refused_in_words(session):
    with pytest.raises(tinker.APIStatusError, match="32"):
        client_of(session(), rank=64)
