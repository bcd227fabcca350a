"""No field of a definition is lost on its way: each is read back from what was built from it, or refused by its name.

What a deployment does with the fields is in tests/deploy. The trainer and the sampling engine are real; `read_back.py` runs
them in a process of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import lilo_definitions
import pytest
import torch
from lilo_definitions import Definition, Part
from lilo_engine import app as engine_app
from lilo_engine.app import build_app
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.bridge import command_limit
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.config import DataFolder
from lilo_engine.errors import InvalidRequest, ServerError
from lilo_engine.parts import Parts, ServerSettings
from lilo_engine.requests.decode import lora_spec
from lilo_engine.requests.wire_json import LoraConfigBody
from lilo_engine.sampling.host import find_factory
from lilo_engine.work import Work
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.launch import launch
from lilo_miles_backend.launchers.offered import check_offered
from lilo_miles_backend.ranks.device import Device
from pydantic import ValidationError

from tests.miles_backend import reference as ref

pytestmark = pytest.mark.timeout(180)  # The first test to want what was built waits for all of it.
ROOT = Path(__file__).resolve().parents[2]
TINY = lilo_definitions.get("tiny")

CHANGES = {
    "name": "changed",
    "summary": "All of it changed",
    "model": {"name": "changed-base", "vocab_size": 97, "context": 200},
    "context": 128,
    "dtype": "bfloat16",
    "lora": {"slots": 3, "max_rank": 7, "alpha": 9.5, "targets": ("mlp",)},
    "limits": {
        "max_tokens_per_rank": 640,
        "max_batch_tokens": 1234,
        "max_forward_backward_batch": 5,
        "logprob_chunk_tokens": 33,
        "max_queued_operations": 17,
        "publication_workers": 3,
        "startup_timeout_s": 41.5,
        "command_timeout_s": 31.5,
        "command_s_per_token": 0.125,
        "distributed_timeout_minutes": 4.5,
    },
    "sampler": {"sequences": 6, "max_adapters": 5, "ephemeral_versions": 3},
    "topology": {"align_sequences_to_parallel_layout": "on"},
    "trainer": {
        "captures": "volume",
        "pack_models": True,
        "keep_activations": "qkv",
        "offload_inputs": True,
    },
}
"""Every field that something here honours, at another value than tiny's."""

READ_FROM_PROCESS = (
    "model.name",
    "model.vocab_size",
    "context",
    "dtype",
    "lora.slots",
    "lora.max_rank",
    "lora.alpha",
    "lora.targets",
    "limits.max_tokens_per_rank",
    "limits.logprob_chunk_tokens",
    "limits.distributed_timeout_minutes",
    "sampler.sequences",
    "sampler.max_adapters",
    "topology.align_sequences_to_parallel_layout",
    "trainer.captures",
    "trainer.keep_activations",
    "trainer.offload_inputs",
    "trainer.pack_models",
)

READ_FROM_RANKS = ("topology.tp", "topology.cp", "topology.dp")

READ_FROM_ENGINE = {
    "limits.max_batch_tokens": lambda d: work(d).scheduler.budget.max_tokens,
    "limits.max_forward_backward_batch": lambda d: work(d).scheduler.budget.max_requests,
    "limits.publication_workers": lambda d: work(d).scheduler.lanes.publication_workers,
    "limits.max_queued_operations": lambda d: work(d)._max_queued,
    "limits.startup_timeout_s": lambda d: command_limit("describe", (), d.limits)[0],
    "limits.command_timeout_s": lambda d: command_limit("capture", (), d.limits)[0],
    "limits.command_s_per_token": lambda d: _seconds_of_a_token(d),
}

REFUSED = {
    "model.family": {"model": {"family": "qwen4_exp"}},
    "topology.gpu": {"topology": {"gpu": "H200"}},
    "topology.gpus_per_node": {"topology": {"gpus_per_node": 1}},
    "topology.rdma": {"topology": {"nodes": 2, "dp": 2, "rdma": True}},
    "trainer.deterministic": {
        "topology": {"device": "cuda", "gpus_per_node": 1},
        "trainer": {"deterministic": True},
    },
}
"""Values that no part of this version honours: the definition or the trainer refuses them."""

ELSEWHERE = {
    "name": "test_a_definition_is_known_by_its_name_and_shown_by_its_summary",
    "summary": "test_a_definition_is_known_by_its_name_and_shown_by_its_summary",
    "model.source": "test_another_source_is_another_model",
    "model.context": "test_a_model_context_over_the_models_positions_is_refused",
    "sampler.engine": "test_a_sampling_engine_that_is_not_installed_is_refused_by_name",
    "sampler.ephemeral_versions": "test_the_sweeper_gets_the_number_of_versions",
    "sampler.pool": "test_a_pool_needs_an_engine_that_has_one",
    "topology.device": "test_a_rank_computes_on_the_device_that_is_asked_for_or_refuses",
    "topology.nodes": "test_several_nodes_need_a_cluster_to_be_named",
}


@pytest.fixture(scope="module")
def definition(tmp_path_factory: pytest.TempPathFactory) -> Definition:
    folder = tmp_path_factory.mktemp("model") / "changed"
    ref.write_random_model(folder, tied=True)
    return TINY.derive(**CHANGES).derive(model={"source": str(folder)})


@pytest.fixture(scope="module")
def found(definition: Definition, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return read_back("read_back", definition, tmp_path_factory.mktemp("out"))


def read_back(program: str, definition: Definition, folder: Path) -> dict[str, object]:
    """What a program of its own found in what it built of the definition."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.definitions.{program}", str(folder)],
        input=definition.model_dump_json(),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def leaves(part: Part, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, Part):
            names += leaves(value, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def parts(part: Part) -> list[Part]:
    inside = [getattr(part, name) for name in type(part).model_fields]
    return [part, *(one for value in inside if isinstance(value, Part) for one in parts(value))]


def test_every_field_says_what_it_means():
    pool = lilo_definitions.get("qwen3_8_27b_miles_lora_256k").sampler.pool
    for part in (*parts(TINY), pool):
        meanings = type(part).meanings()
        assert set(meanings) == set(type(part).model_fields), type(part)
        assert min(map(len, meanings.values())) > 8


def value_of(definition: Definition, field: str) -> object:
    value: object = definition
    for name in field.split("."):
        value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def test_every_field_is_proven_somewhere():
    proven = {*READ_FROM_PROCESS, *READ_FROM_RANKS, *READ_FROM_ENGINE, *REFUSED, *ELSEWHERE}
    fields = {field for field in leaves(TINY) if not field.startswith("deployment.")}
    assert fields == proven, (
        "a new field needs a proof that it arrives; deployment's are in tests/deploy"
    )
    assert all(name in globals() for name in ELSEWHERE.values())


@pytest.mark.parametrize("field", READ_FROM_PROCESS)
def test_what_was_built_has_the_definitions_value(field, definition, found):
    assert value_of(definition, field) != value_of(TINY, field)
    assert found[field] == value_of(definition, field)


def test_ranks_are_built_in_the_definitions_layout(tmp_path):
    layout = TINY.derive(topology={"tp": 2, "cp": 2, "dp": 2})
    found = read_back("read_back_layout", layout, tmp_path)
    assert {field: found[field] for field in READ_FROM_RANKS} == {
        field: value_of(layout, field) for field in READ_FROM_RANKS
    }
    assert found["rows of the head"] == TINY.model.vocab_size // 2


def test_a_rank_computes_on_the_device_that_is_asked_for_or_refuses():
    asked = {"threads": 1, "local_rank": 0, "num_devices": 1}
    assert Device.of(TINY.topology, **asked).torch_device.type == "cpu"
    on_gpu = TINY.derive(topology={"device": "cuda", "gpus_per_node": 1}).topology
    if torch.cuda.is_available():
        assert Device.of(on_gpu, **asked).torch_device.type == "cuda"
    else:
        with pytest.raises(InvalidRequest, match=r"topology\.device is cuda"):
            Device.of(on_gpu, **asked)


def test_several_nodes_need_a_cluster_to_be_named(tmp_path):
    two = TINY.derive(topology={"nodes": 2, "dp": 2})
    config = BackendConfig(definition=two, checkpoints_root=str(tmp_path), epoch=1)
    with pytest.raises(InvalidRequest, match=r"2 nodes.* --ray"):
        launch(config, BackendSettings())


def test_one_model_more_than_slots_is_refused_with_their_number(found):
    assert "all 3 adapter slots" in str(found["slots refused"])


@pytest.mark.anyio
@pytest.mark.parametrize("field", READ_FROM_ENGINE)
async def test_the_engine_has_the_definitions_value(field, definition):
    assert value_of(definition, field) != value_of(TINY, field)
    assert READ_FROM_ENGINE[field](definition) == value_of(definition, field)


def work(definition: Definition) -> Work:
    return Work(definition, suspend_idle_s=1.0)


def _seconds_of_a_token(definition: Definition) -> float:
    datums = (ref.datum(8, ref.np.random.default_rng(0), vocab=97),)
    item = WorkItem(operation_id="o", model_id="m", datums=datums)
    batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=(item,))
    limit, _ = command_limit("forward_backward", (batch,), definition.limits)
    return (limit - definition.limits.command_timeout_s) / 8


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_built_is_refused_by_the_fields_name(field):
    with pytest.raises((ValidationError, InvalidRequest)) as refusal:
        check_offered(TINY.derive(**REFUSED[field]))
    message = str(refusal.value)
    name = field.rpartition(".")[2]
    assert field in message or name in message


def test_all_that_is_not_built_is_refused_in_one_message():
    big = lilo_definitions.get("qwen3_8_27b_miles_lora_256k")
    with pytest.raises(InvalidRequest) as refusal:
        check_offered(big.derive(trainer={"deterministic": True}))
    for field in ("trainer.deterministic", "topology.rdma"):
        assert field in str(refusal.value)


def test_the_clients_alpha_is_the_definitions(definition):
    spec = lora_spec(LoraConfigBody(rank=4), definition.lora.alpha)
    assert spec.alpha == 9.5


def test_a_definition_is_known_by_its_name_and_shown_by_its_summary():
    from lilo_engine.cli.main import build
    from typer.testing import CliRunner

    shown = CliRunner().invoke(build(), ["definitions", "list", "--json"])
    by_name = {one["name"]: one["summary"] for one in json.loads(shown.stdout)}
    assert by_name["tiny"] == TINY.summary


def test_another_source_is_another_model(definition, found):
    assert found["model.vocab_size"] == 97 != TINY.model.vocab_size
    assert definition.model.source != TINY.model.source


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": {"context": 2048}}, "model.context 2048"),
        ({"model": {"vocab_size": 300}}, "model.vocab_size is 300"),
    ],
)
def test_a_model_context_over_the_models_positions_is_refused(changes, field, tmp_path):
    from lilo_miles_backend import MilesBackend

    with pytest.raises(InvalidRequest, match=field):
        MilesBackend(
            BackendConfig(
                definition=TINY.derive(**changes), checkpoints_root=str(tmp_path), epoch=1
            )
        )


def test_a_sampling_engine_that_is_not_installed_is_refused_by_name():
    with pytest.raises(ServerError, match="no sampling engine 'sglang'"):
        find_factory("sglang")


def test_a_pool_needs_an_engine_that_has_one():
    pool = lilo_definitions.get("qwen3_8_27b_miles_lora_16k").sampler.pool
    with pytest.raises(ValidationError, match="pool"):
        TINY.derive(sampler={"pool": pool})
    with pytest.raises(ValidationError, match="pool"):
        TINY.derive(sampler={"engine": "vllm"})


def test_the_sweeper_gets_the_number_of_versions(definition, tmp_path, monkeypatch):
    seen = []

    class Recorded(engine_app.Sweeper):
        def __init__(self, *arguments, **keywords):
            seen.extend(arguments)
            super().__init__(*arguments, **keywords)

    monkeypatch.setattr(engine_app, "Sweeper", Recorded)
    data = DataFolder(root=tmp_path)
    data.create()
    parts = Parts.of_processes(definition, data, ServerSettings())
    build_app(parts)
    assert [one.unnamed_versions for one in seen if hasattr(one, "unnamed_versions")] == [3]
    parts.control.records.close()


def test_the_cpu_trainer_is_deterministic_without_being_asked():
    check_offered(TINY.derive(trainer={"deterministic": True}))
