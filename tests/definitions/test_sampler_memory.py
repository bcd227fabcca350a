"""What the embedded sampler takes of a GPU that it shares: its arithmetic by hand."""

import pytest
from lilo_definitions import GPUS, get
from lilo_definitions.planner import Job, make_plan, sampler_memory

H200 = GPUS["H200"].memory_bytes


def test_a_dense_models_tokens_and_weights_by_hand():
    share = sampler_memory(get("qwen3_8b"), device_bytes=H200)
    # 36 layers, 8 key-value heads of 128 features, a key and a value of 2 bytes each.
    assert (share.token_bytes, share.row_bytes) == (36 * 8 * 128 * 2 * 2, 0)
    assert share.weights == pytest.approx(2 * 8.19e9, rel=0.001)


def test_a_hybrids_rows_hold_states_and_only_its_full_layers_tokens():
    # 48 delta layers of 48 value heads, 16 key heads and 128 x 128 features; 16 full layers of 4 heads x 256.
    changes = {"engine": "embedded", "pool": None}
    share = sampler_memory(
        get("qwen3_8_27b_miles_lora_16k").derive(name="own", sampler=changes), device_bytes=H200
    )
    channels = 2 * 16 * 128 + 48 * 128
    assert share.row_bytes == 48 * (48 * 128 * 128 * 4 + 3 * channels * 2)
    assert share.token_bytes == 16 * 4 * 256 * 2 * 2


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_14b"])
def test_the_leanest_trainer_fits_beside_the_sampler(name):
    definition = get(name)
    gpu = GPUS[definition.topology.gpu]
    share = sampler_memory(definition, device_bytes=gpu.memory_bytes)
    plan = make_plan(Job.of(definition))
    assert share.total + plan.peaks["input"] <= plan.limit_bytes
    assert share.cache >= 2 * definition.context * share.token_bytes


def test_no_more_is_taken_than_all_sequences_need():
    small = get("qwen3_0_6b").derive(name="small", context=1024, sampler={"sequences": 2})
    share = sampler_memory(small, device_bytes=H200)
    assert share.cache == 2 * 1024 * share.token_bytes


@pytest.mark.parametrize("name", ["tiny", "qwen3_8_27b_miles_lora_16k"])
def test_a_sampler_that_is_elsewhere_takes_nothing(name):
    assert sampler_memory(get(name), device_bytes=H200) is None
