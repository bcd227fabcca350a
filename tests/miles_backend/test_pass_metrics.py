"""What a pass says about itself, and what a client's library makes of the chunks of one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lilo_definitions.gpus import GPUS, bf16_flops_per_s
from lilo_miles_backend.ranks.pass_metrics import PassMetrics
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput

ONE = PassMetrics(
    loss=2.0,
    tokens=300,
    padded_tokens=320.0,
    seconds=0.5,
    flops=8e12,
    ranks=2,
    peak_flops_per_s=16e12,
    peak_memory_bytes=5e9,
    fill=0.75,
)


def test_speed_is_that_of_one_rank_and_utilisation_its_share_of_the_peak() -> None:
    named = ONE.named()
    assert named["model_flops_per_s_per_rank:mean"] == 8e12
    assert named["utilisation:mean"] == 0.5
    assert "utilisation:mean" not in replace(ONE, peak_flops_per_s=None).named()
    assert all(name.count(":") == 1 for name in named)


def test_a_pass_too_short_for_the_clock_has_no_speed() -> None:
    assert replace(ONE, seconds=0.0).named()["model_flops_per_s_per_rank:mean"] == 0.0


def test_chunks_of_one_call_add_up_in_the_clients_library() -> None:
    two = replace(ONE, tokens=100, seconds=1.5, flops=12e12, peak_memory_bytes=7e9, fill=0.25)
    chunks = [
        ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            metrics=dict(metrics.named()),
            loss_fn_outputs=[{}] * datums,
        )
        for metrics, datums in ((ONE, 3), (two, 1))
    ]
    combined = combine_fwd_bwd_output_results(chunks).metrics
    assert combined["loss:sum"] == 4.0
    assert combined["tokens:sum"] == 400.0
    assert combined["seconds:sum"] == 2.0
    assert combined["model_flops:sum"] == 20e12
    assert combined["peak_memory_bytes:max"] == 7e9
    assert combined["microbatch_fill:mean"] == pytest.approx((3 * 0.75 + 0.25) / 4)


@pytest.mark.parametrize(
    ("reported", "name"), [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100-80GB")]
)
def test_a_devices_peak_is_known_by_the_name_that_it_reports(reported: str, name: str) -> None:
    assert bf16_flops_per_s(reported) == pytest.approx(989e12 * GPUS[name].speed)
    assert bf16_flops_per_s("NVIDIA H100 PCIe") is None  # slower than the one in our table
