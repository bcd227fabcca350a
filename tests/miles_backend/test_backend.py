"""MilesBackend as the engine sees it: what it says of itself, and what it refuses before anything runs."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from lilo_definitions import Definition, Topology, get
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.operation import ModelId
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.ranks.model import BaseModel
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


def test_the_model_of_an_ended_backend_is_let_go_of_at_once_not_when_the_collector_runs(
    random_models: dict[str, Definition], tmp_path: Path
) -> None:
    others = {id(model) for model in _models()}
    gc.disable()
    try:
        backend = ref.start(random_models["tied"], tmp_path)
        backend.create_adapter(ModelId("m"), ref.spec(3, seed=1))
        (model,) = [weakref.ref(model) for model in _models() if id(model) not in others]
        backend.close()
        del backend
        assert model() is None
    finally:
        gc.enable()


def _models() -> list[BaseModel]:
    # By `type`: torch keeps objects that warn when they are asked what they are an instance of.
    return [found for found in gc.get_objects() if type(found) is BaseModel]
