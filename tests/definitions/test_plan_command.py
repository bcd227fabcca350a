"""`lilo plan`, driven as people and programs do."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import lilo_definitions
import pytest
from lilo_definitions import architecture_of
from lilo_definitions.planner import Job, make_plan
from lilo_definitions.planner.chart import svg
from lilo_engine.cli.main import build
from typer.testing import CliRunner

BIG = "qwen3_8_27b_miles_lora_256k"
RAW_MILES = ("qwen3_5_9b_dapo_sweep", "qwen3_5_9b_miles_lora_16k", "qwen3_5_9b_miles_lora_64k")
"""In layouts that repeat key-value heads."""
runner = CliRunner()


def run(*arguments: str):
    return runner.invoke(build("plan"), ["plan", *arguments])


@pytest.mark.parametrize("name", lilo_definitions.names())
def test_every_definition_plans_as_one_json_object(name):
    done = run(name, "--json", *(("--trainer", "miles") if name in RAW_MILES else ()))
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert isinstance(plan["peak_allocated_gb"], float)
    assert plan["peak_allocated_gb"] == pytest.approx(sum(plan["memory_gb"].values()), abs=0.01)
    assert plan["fits"] in (True, None)
    assert plan["parameters"] == architecture_of(lilo_definitions.get(name)).parameters


def test_people_get_a_bar_and_a_sentence(tmp_path):
    done = run(BIG)
    assert done.exit_code == 0
    for words in ("kept activations", "limit", "fits", "USD", "TFLOP/s", "checkpoint"):
        assert words in done.stdout


def test_the_picture_has_one_bar_per_rank(tmp_path):
    path = tmp_path / "plan.svg"
    assert run(BIG, "--svg", str(path)).exit_code == 0
    root = ET.fromstring(path.read_text())
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {str(rank) for rank in range(16)} <= set(texts)
    assert path.read_text() == svg(make_plan(Job.of(lilo_definitions.get(BIG))))


def test_any_models_config_can_be_planned(tmp_path):
    folder = lilo_definitions.resolve_source("package:lilo_definitions/data/tiny")
    for name in (str(folder), str(folder / "config.json")):
        plan = json.loads(run(name, "--context", "512", "--json").stdout)
        assert (plan["parameters"], plan["context"]) == (821_120, 512)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tinny",), "tiny"),
        ((BIG, "--context", "300000"), "262144"),
        ((BIG, "--keep", "none"), "input, attention, qkv, all"),
        ((BIG, "--gpu", "H300"), "H200"),
        ((BIG, "--gpus", "7"), "tp 2 x cp 8"),
        ((BIG, "--tp", "3"), "4 key-value heads"),
        ((BIG, "--tp", "8", "--cp", "2"), "topology.tp 8 does not divide num_key_value_heads 4"),
        *(((name,), "plan the raw run with --trainer miles") for name in RAW_MILES),
        ((BIG, "--trainer", "miles", "--keep", "all"), "raw Miles keeps input"),
        (("no-such-folder/config.json",), "No such file"),
        (("tiny", "--search"), "CPU"),
        (("tiny", "--trainer", "miles"), "CUDA"),
        ((BIG, "--search", "--gpus", "1"), "try more --gpus"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert words in line


def test_another_context_is_planned_on_request():
    shorter = json.loads(run(BIG, "--context", "65536", "--json").stdout)
    assert (shorter["context"], shorter["tokens_per_rank"]) == (65536, 8192)


def test_planning_imports_neither_torch_nor_rich_for_programs():
    code = (
        "import sys; sys.argv = ['lilo', 'plan', 'tiny', '--json']\n"
        "from lilo_engine.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'rich', 'yaml', 'uvicorn', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.splitlines()[-1] == "[]"
