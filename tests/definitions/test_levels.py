"""What each layer keeps, chosen from the memory that is left."""

from __future__ import annotations

from dataclasses import replace

import lilo_definitions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lilo_definitions.planner import Job, make_plan
from lilo_definitions.planner.flops import flops_of
from lilo_definitions.planner.levels import choose_levels, fullest_of
from lilo_definitions.planner.memory import memory_of
from lilo_definitions.planner.traffic import traffic_of
from lilo_definitions.trainer import KEEPS

NAMES = ("qwen3_8b", "qwen3_8_27b_miles_lora_256k")


def job(name: str, tokens: int = 65536) -> Job:
    return replace(Job.of(lilo_definitions.get(name)), tokens_per_rank=tokens, keep="auto")


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(NAMES), st.sampled_from([4096, 65536, 262144]), st.floats(0, 1.1))
def test_the_peak_is_within_the_room_and_no_layer_could_keep_more(name, tokens, share):
    one = job(name, tokens)
    layers = one.architecture.layers
    least, most = (fullest_of(one, (keep,) * layers).total for keep in ("input", "all"))
    room = least + share * (most - least)
    levels = choose_levels(one, room)
    assert fullest_of(one, levels).total <= room
    for index, level in enumerate(levels):
        if level != "all":
            more = (*levels[:index], KEEPS[KEEPS.index(level) + 1], *levels[index + 1 :])
            assert fullest_of(one, more).total > room, (index, levels)


@pytest.mark.parametrize("name", NAMES)
def test_last_layers_of_a_kind_keep_more_than_first_ones(name):
    one = job(name)
    layers = one.architecture.layers
    least, most = (fullest_of(one, (keep,) * layers).total for keep in ("input", "all"))
    levels = choose_levels(one, (least + most) / 2)
    for kind in set(one.architecture.kinds):
        mine = [
            KEEPS.index(level)
            for level, other in zip(levels, one.architecture.kinds, strict=True)
            if other == kind
        ]
        assert mine == sorted(mine)
    assert len(set(levels)) > 1


def test_at_long_context_the_attentions_output_is_kept_before_anything_else():
    one = job("qwen3_8b", 131072)
    layers = one.architecture.layers
    attention = fullest_of(one, ("attention",) * layers).total
    levels = choose_levels(one, attention)
    # What the last layer keeps its backward need not make, so a step of it may be free.
    assert set(levels[:-1]) == {"attention"}


def test_too_little_room_keeps_inputs_and_no_limit_keeps_everything():
    one = job("qwen3_8b")
    layers = one.architecture.layers
    assert choose_levels(one, 0.0) == ("input",) * layers
    assert choose_levels(one, None) == ("all",) * layers
    assert choose_levels(job("tiny"), 0.0) == ("all",) * job("tiny").architecture.layers  # on CPU


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("away", [False, True])
def test_layers_that_keep_alike_cost_what_the_level_costs(keep, away):
    one = replace(job("qwen3_8b"), offload_inputs=away)
    levels = (keep,) * one.architecture.layers
    assert memory_of(one, "lilo", levels).peak == pytest.approx(memory_of(one, "lilo", keep).peak)
    assert flops_of(one, levels) == flops_of(one, keep)
    assert traffic_of(one, levels) == traffic_of(one, keep)


@pytest.mark.parametrize("keep", KEEPS)
def test_inputs_that_wait_elsewhere_leave_three_of_them_on_the_gpu(keep):
    one = job("qwen3_8b", 16384)
    here, away = (
        memory_of(replace(one, offload_inputs=flag), "lilo", keep) for flag in (False, True)
    )
    layers, size = one.architecture.layers, 16384 * 2 * one.architecture.hidden
    assert here.peak - away.peak == pytest.approx((layers - 3) * size)
    plan = make_plan(replace(one, offload_inputs=True, keep=keep))
    assert plan.memory == away
    (note,) = [note for note in plan.notes if "pinned" in note]
    assert f"{layers * size / 1e9:.1f} GB" in note  # a layer's are a power of two here


def test_with_inputs_elsewhere_layers_keep_more_of_the_rest():
    one = job("qwen3_8b", 65_536)
    here, away = (make_plan(replace(one, offload_inputs=flag)) for flag in (False, True))
    assert sum(map(KEEPS.index, away.levels)) > sum(map(KEEPS.index, here.levels))
    assert away.fits is True


def test_a_plan_with_auto_fits_where_keeping_everything_does_not():
    one = job("qwen3_8b", 40_000)
    everything, chosen = make_plan(replace(one, keep="all")), make_plan(one)
    least = make_plan(replace(one, keep="input"))
    assert everything.fits is False
    assert chosen.fits is True
    assert chosen.keep == "auto"
    assert least.step.seconds > chosen.step.seconds > everything.step.seconds
    assert chosen.as_json()["keep_activations"] == "auto"
    assert sum(chosen.as_json()["layers_by_keep"].values()) == one.architecture.layers
