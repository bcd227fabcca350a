"""`lilo bench trainer` and `lilo bench sampler`: what they measure is one computation done in several ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lilo_engine.cli.main import build
from lilo_miles_backend.bench.gpu import measure
from lilo_miles_backend.bench.plot import write_plot
from typer.testing import CliRunner


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_methods_compute_the_same_loss_and_each_has_a_speed() -> None:
    done = CliRunner().invoke(
        build("bench"), ["bench", "trainer", "--size", "1M", "--rounds", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["1M"]
    assert figures["largest_relative_difference_of_losses"] <= 1e-5
    assert 800_000 < figures["parameters"] < 1_200_000
    for method in ("hf_peft", "one_adapter", "four_adapters", "four_adapters_packed"):
        assert figures[f"{method}_tokens_per_cpu_s"] > 0


def test_an_unknown_size_is_refused_with_those_there_are() -> None:
    done = CliRunner().invoke(build("bench"), ["bench", "trainer", "--size", "2M"])
    assert done.exit_code == 1
    assert "1M, 10M, 60M" in done.output


@pytest.mark.slow
def test_settings_of_the_gpu_bench_are_measured_in_processes_of_their_own_and_drawn(
    tmp_path: Path,
) -> None:
    told: list[object] = []
    points = measure(
        "small", 2, (32, 64), ("ours:input", "no such"), device="cpu", told=told.append
    )
    assert told == points
    assert [(point["setting"], point.get("tokens")) for point in points] == [
        ("ours, keep input", 32),
        ("ours, keep input", 64),
        ("no such", None),
    ]
    assert all(point["tok_s"] > 0 for point in points[:2])
    assert "no such" in points[2]["error"]
    write_plot(points, tmp_path / "speed.svg", "two layers")
    assert "ours, keep input" in (tmp_path / "speed.svg").read_text("utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_one_sentence() -> None:
    done = CliRunner().invoke(build("bench"), ["bench", "trainer", "--device", "cuda"])
    assert done.exit_code == 1
    assert "--device cpu" in done.output


@pytest.mark.slow
def test_the_sampler_and_its_peers_are_measured_on_the_same_weights_in_every_section() -> None:
    small = "--sequences 1 --sequences 4 --prompt-tokens 8 --new-tokens 4 --long-tokens 40 --adapters 2 --rounds 1"
    done = CliRunner().invoke(build("bench"), ["bench", "sampler", "--json", *small.split()])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["agreement"]["largest_difference_of_logprobs"] <= 1e-4
    cases = {name: list(found) for name, found in report.items() if name != "settings"}
    assert cases == {
        "agreement": ["largest_difference_of_logprobs"],
        "one_prompt": ["1", "4"],
        "many_prompts": ["1", "4"],
        "adapters": ["4 of 2 adapters"],
        "prefill": ["40 tokens"],
        "publish": ["lora_rank 16"],
    }
    for name in list(cases)[1:]:
        for figures in report[name].values():
            unit = "s" if name in ("prefill", "publish") else "tokens_per_s"
            assert all(figures[f"{who}_{unit}"] > 0 for who in ("ours", "peft", "merged"))
            ratio = (
                figures["peft_cpu_s"] / figures["ours_cpu_s"]
                if unit == "s"
                else (figures["ours_tokens_per_cpu_s"] / figures["peft_tokens_per_cpu_s"])
            )
            assert figures["ours_against_peft"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--section speed", "one_prompt, many_prompts, adapters, prefill, publish"),
        ("--device tpu", "choose cuda or cpu"),
        ("--new-tokens 2000", "over the context of 1024"),
        ("--definition smollm2_135", "smollm2_135m"),
    ],
)
def test_what_the_sampler_bench_cannot_measure_is_one_sentence(arguments: str, words: str) -> None:
    done = CliRunner().invoke(build("bench"), ["bench", "sampler", *arguments.split()])
    assert done.exit_code == 1
    assert words in done.output
