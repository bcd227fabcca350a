"""The planner: its arithmetic by hand. As a command: test_plan_command.py; against measurements: proofs/planner.py."""

from dataclasses import replace
from functools import cache

import lilo_definitions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_definitions import ARCHITECTURES, GPUS
from lilo_definitions.planner import Job, make_plan, nearest_fit, ranked_layouts
from lilo_definitions.planner.adapters import adapter_parameters, adapter_parameters_on_a_rank
from lilo_definitions.planner.flops import flops_of
from lilo_definitions.trainer import KEEPS

BIG = "qwen3_8_27b_miles_lora_256k"


@cache
def built(name: str) -> Job:
    return Job.of(lilo_definitions.get(name))


def job(name: str = BIG, **changes) -> Job:
    return replace(built(name), **changes)


def test_the_matched_run_of_the_27b_at_256k_is_predicted():
    assert make_plan(job(), "miles").memory.peak / 1e9 == pytest.approx(82.4, rel=0.1)


def test_lilo_needs_less_than_60_gb_there_with_full_recompute():
    assert make_plan(job()).memory.peak < 60e9


def test_keeping_more_needs_more_memory_and_fewer_operations():
    plans = [make_plan(job(keep=keep)) for keep in KEEPS]
    peaks = [plan.memory.peak for plan in plans]
    totals = [plan.flops.total for plan in plans]
    assert peaks == sorted(peaks)
    assert totals == sorted(totals, reverse=True)


def test_operations_of_a_small_dense_model_by_hand():
    # Qwen3 0.6B, 1,000 tokens, everything kept: 4 per weight of linears and head, attention 2 x 3.5 x width x length.
    model = ARCHITECTURES["Qwen/Qwen3-0.6B"]
    one = job("qwen3_0_6b", context=1000, keep="all", targets=("attn",), lora_rank=1)
    layer = 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072
    flops = flops_of(one, "all")
    assert flops.layers == 4 * 28 * layer == 4 * model.layer_weights
    assert flops.head == 4 * 151_936 * 1024
    assert flops.scores_forward == 28 * 2 * 2048 * 1000
    assert flops.scores_backward == 2.5 * flops.scores_forward
    adapters = 28 * (3 * 1024 + 2048 + 2 * 1024 + 2048 + 1024)
    assert adapter_parameters(one) == adapters
    assert flops.adapters == 6 * adapters


@settings(deadline=None, max_examples=30)
@given(tp=st.sampled_from([1, 2, 4]), rank=st.integers(1, 64))
def test_ranks_together_hold_each_adapter_at_least_once(tp, rank):
    one = job(tp=tp, lora_rank=rank)
    share = adapter_parameters_on_a_rank(one)
    assert adapter_parameters(one) / tp <= share <= adapter_parameters(one)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(lilo_definitions.names()),
    st.integers(1, 64),
    st.sampled_from([1024, 4096, 16384, 65536]),
)
def test_more_adapters_and_longer_rows_never_need_less(name, slots, tokens):
    one = job(name, slots=slots, tokens_per_rank=tokens, keep="attention")
    peak = make_plan(one).memory.peak
    assert make_plan(replace(one, slots=slots + 1)).memory.peak > peak
    assert make_plan(replace(one, tokens_per_rank=tokens * 2)).memory.peak > peak


def test_what_does_not_fit_names_the_nearest_layout_that_does():
    too_large = job("qwen3_32b", tp=1, gpu=GPUS["H100"])
    plan = make_plan(too_large)
    assert plan.fits is False
    nearest = nearest_fit(too_large)
    assert nearest is not None
    assert nearest.fits
    assert (nearest.job.world_size, nearest.job.tp) == (2, 2)


def test_a_search_gives_layouts_that_fit_fastest_first():
    found = ranked_layouts(job(), 16)
    assert all(plan.fits and plan.job.world_size == 16 for plan in found)
    seconds = [plan.step.seconds for plan in found]
    assert seconds == sorted(seconds)
    assert (2, 8) in [(plan.job.tp, plan.job.cp) for plan in found]


def test_tensor_parallel_ranks_over_the_kv_heads_are_refused_for_our_trainer_and_noted_for_the_other():
    one = job("qwen3_5_9b_miles_lora_16k")
    assert make_plan(one).refusals == ("topology.tp 8 does not divide num_key_value_heads 4",)
    theirs = make_plan(one, "miles")
    assert theirs.refusals == ()
    assert any("key-value heads" in note for note in theirs.notes)
    assert make_plan(replace(one, tp=4, dp=2)).refusals == ()


def test_cpu_ranks_share_out_what_is_kept_and_work_with_the_keys_they_gather():
    one, two = make_plan(job("tiny")).memory, make_plan(job("tiny", tp=2)).memory
    assert two.kept == one.kept / 2
    assert two.weights == one.weights / 2
    tokens = job("tiny").tokens_per_rank
    model = job("tiny").architecture
    alone, cut = (
        next(m for m in make_plan(job("tiny", cp=cp)).moments if m.name == "attention backward")
        for cp in (1, 2)
    )
    # Of both ranks, keys and values and their gradients, float32.
    assert cut.working - alone.working == tokens * 2 * model.kv_width * 2 * 2 * 4


def test_the_residual_stream_is_whole_on_each_tensor_parallel_rank_where_it_is_not_shared_out():
    whole, shared = (
        make_plan(job("qwen3_8b", tp=2, keep="input", sequence_parallel=one)).memory.kept
        for one in (False, True)
    )
    assert whole == 2 * shared
