"""`lilo bench trainer`: what it measures is one computation done in several ways."""

from __future__ import annotations

import json

import pytest
from lilo_engine.cli.main import build
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
