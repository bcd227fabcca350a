"""The definitions that ship: their models, their layouts, their names, their digests."""

import json
import re
import subprocess
import sys
from pathlib import Path

import lilo_definitions
import pytest
from lilo_definitions import ARCHITECTURES, architecture_of
from lilo_definitions.miles_args import OWNED, miles_args
from lilo_definitions.planner import Job
from lilo_definitions.planner.adapters import adapter_parameters

from tests.definitions import meta_models

BIG = "qwen3_8_27b_miles_lora_256k"
# Name, model, context, slots, nodes x GPUs, TP/CP/DP, tokens per GPU, head adapted, replicas of how many GPUs,
# running/target/loaded/per batch: the table of the matched runs.
MATCHED = [
    ("qwen3_8_27b_miles_lora_16k", 16384, 6, (1, 8), (4, 1, 2), 16384, False, (8, 1), (32, 16, 256, 8)),
    ("qwen3_8_27b_miles_lora_64k", 65536, 6, (1, 8), (4, 2, 1), 32768, False, (8, 1), (16, 8, 256, 8)),
    ("qwen3_8_27b_miles_lora_128k", 131072, 6, (1, 8), (2, 4, 1), 32768, False, (4, 2), (8, 4, 256, 8)),
    ("qwen3_8_27b_miles_lora_256k", 262144, 6, (2, 8), (2, 8, 1), 32768, False, (2, 4), (4, 2, 256, 8)),
    ("qwen3_5_9b_base_miles_lora_2k", 2048, 4, (1, 4), (4, 1, 1), 2048, True, (8, 1), (32, 16, 32, 8)),
    ("qwen3_5_9b_base_miles_lora_16k", 16384, 6, (1, 4), (4, 1, 1), 16384, True, (8, 1), (32, 16, 64, 8)),
    ("qwen3_5_9b_miles_lora_16k", 16384, 6, (1, 8), (8, 1, 1), 16384, False, (8, 1), (32, 16, 256, 8)),
    ("qwen3_5_9b_miles_lora_16k_dp2", 16384, 6, (1, 8), (4, 1, 2), 16384, False, (8, 1), (32, 16, 256, 8)),
    ("qwen3_5_9b_miles_lora_64k", 65536, 4, (1, 8), (8, 1, 1), 65536, True, (8, 1), (32, 16, 64, 4)),
    ("qwen3_5_9b_dapo_sweep", 16384, 32, (1, 8), (8, 1, 1), 114688, True, (8, 1), (128, 128, 128, 16)),
]  # fmt: skip


@pytest.mark.parametrize("name", lilo_definitions.names())
def test_every_definition_loads_and_agrees_with_its_model(name):
    definition = lilo_definitions.get(name)
    model = architecture_of(definition)
    assert definition.model.family == model.family
    assert definition.model.vocab_size == model.vocab
    assert definition.model.context == model.context
    again = lilo_definitions.Definition.model_validate_json(definition.model_dump_json())
    assert lilo_definitions.digest(again) == lilo_definitions.digest(definition)


def test_the_table_in_the_documents_is_what_the_definitions_say():
    """Digests among it: a definition does not change unnoticed, and its digest is the same on every machine."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "definitions_table.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_two_definitions_share_a_base_model_name_or_a_digest():
    definitions = [lilo_definitions.get(name) for name in lilo_definitions.names()]
    assert len({one.model.name for one in definitions}) == len(definitions)
    assert len({lilo_definitions.digest(one) for one in definitions}) == len(definitions)


def test_names_of_one_model_differ_by_what_follows_the_colon():
    names = [lilo_definitions.get(name).model.name for name in lilo_definitions.names()]
    of_27b = [name for name in names if name.startswith("Qwen/Qwen3.8-27B")]
    assert sorted(of_27b) == [f"Qwen/Qwen3.8-27B:{size}" for size in ("128k", "16k", "256k", "64k")]


@pytest.mark.parametrize(
    ("name", "context", "slots", "gpus", "degrees", "tokens", "head", "replicas", "sampler"),
    MATCHED,
)
def test_matched_definitions_have_the_numbers_of_the_runs_they_match(
    name, context, slots, gpus, degrees, tokens, head, replicas, sampler
):
    one = lilo_definitions.get(name)
    layout, pool = one.topology, one.sampler.pool
    assert pool is not None
    assert (one.context, one.lora.slots, one.lora.max_rank) == (context, slots, 32)
    assert one.lora.alpha == 32.0
    assert (layout.nodes, layout.gpus_per_node) == gpus
    assert (layout.tp, layout.cp, layout.dp) == degrees
    assert one.limits.max_tokens_per_rank == tokens
    assert ("unembed" in one.lora.targets) is head
    assert (pool.max_replicas, pool.gpus_per_replica) == replicas
    running = (one.sampler.sequences, pool.target_sequences)
    assert (*running, one.sampler.max_adapters, pool.adapters_per_batch) == sampler
    assert one.trainer.keep_activations == "input"
    assert (pool.memory_fraction, one.deployment.trainer_timeout_hours) == (0.8, 24.0)
    assert one.deployment.single_use_containers


def test_the_256k_definition_is_exactly_the_published_one():
    one = lilo_definitions.get(BIG)
    assert one.model.name == "Qwen/Qwen3.8-27B:256k"
    assert (one.topology.nodes, one.topology.gpus_per_node, one.topology.gpu) == (2, 8, "H200")
    assert (one.topology.tp, one.topology.cp, one.topology.dp) == (2, 8, 1)
    assert one.topology.rdma
    assert one.limits.distributed_timeout_minutes == 120.0
    assert one.limits.max_forward_backward_batch == 1
    assert one.trainer.captures == "volume"
    pool = one.sampler.pool
    assert pool is not None
    assert (pool.gpu, pool.max_replicas, pool.min_replicas, pool.gpus_per_replica) == (
        "H200",
        2,
        2,
        4,
    )
    # 2 x cp x tp: a full row needs no padding, so nothing is aligned beyond what the layout needs.
    assert one.context % 32 == 0
    assert one.topology.align_sequences_to_parallel_layout == "auto"


@pytest.mark.parametrize(
    "name", sorted({**ARCHITECTURES, "tiny": None}, key=str), ids=lambda name: name
)
def test_parameters_are_counted_as_transformers_counts_them(name):
    model = ARCHITECTURES.get(name) or architecture_of(lilo_definitions.get("tiny"))
    assert model.parameters == meta_models.count(model)


def test_a_configuration_read_from_a_file_gives_the_same_sizes(tmp_path):
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    model = ARCHITECTURES["Qwen/Qwen3.8-27B"]
    assert model.linear is not None
    config = Qwen3_5TextConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.context,
        linear_num_value_heads=model.linear.value_heads,
    )
    config.save_pretrained(tmp_path)
    assert lilo_definitions.read_model_config(tmp_path).architecture() == model
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "vision_config": {}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert lilo_definitions.read_model_config(tmp_path).architecture() == model


def test_another_kind_of_model_is_refused_by_its_type(tmp_path):
    config = {
        "model_type": "qwen4_exp",
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(lilo_definitions.InvalidSource, match="qwen4_exp"):
        lilo_definitions.read_model_config(tmp_path).architecture()


# A model of the hub.


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache and an empty LILO_MODELS."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LILO_MODELS", str(tmp_path / "models"))
    return tmp_path


def put(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_model_of_the_hub_is_found_in_our_folder_first_then_in_the_cache(hub):
    cached = hub / "hub" / "models--Qwen--Qwen3-8B"
    snapshot = put(cached / "snapshots" / "abc", config__json="{}")
    put(cached / "refs", main="abc")
    assert lilo_definitions.resolve_source("hf:Qwen/Qwen3-8B") == snapshot
    ours = put(hub / "models" / "Qwen" / "Qwen3-8B", config__json="{}")
    assert lilo_definitions.resolve_source("hf:Qwen/Qwen3-8B") == ours


def test_a_model_that_is_not_here_says_how_to_get_it(hub):
    with pytest.raises(lilo_definitions.MissingModel, match="hf download Qwen/Qwen3-8B"):
        lilo_definitions.resolve_source("hf:Qwen/Qwen3-8B")


def test_an_interrupted_download_is_not_taken_for_a_model(hub):
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    folder = put(hub / "models" / "Qwen" / "Qwen3-8B", config__json="{}")
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "one.safetensors").write_text("")
    with pytest.raises(lilo_definitions.InvalidSource, match=r"1 of 2.*two\.safetensors"):
        lilo_definitions.resolve_source("hf:Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    "index", ["", "[]", "null", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": [1]}', 9000 * "["]
)
def test_an_index_of_weights_that_is_none_is_named(hub, index):
    folder = put(hub / "models" / "Qwen" / "Qwen3-8B", config__json="{}")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(lilo_definitions.InvalidSource, match="is no weight index"):
        lilo_definitions.resolve_source("hf:Qwen/Qwen3-8B")


def test_a_config_that_is_none_is_named(hub):
    folder = put(hub / "model", config__json=9000 * "[")
    with pytest.raises(lilo_definitions.InvalidSource, match="is not a model configuration"):
        lilo_definitions.read_model_config(folder)


@pytest.mark.parametrize("source", ["hf:", "hf:Qwen", "hf:../etc", "hf:a/b/c", "hf:a/../b"])
def test_a_name_that_is_none_of_the_hub_is_refused(hub, source):
    with pytest.raises(lilo_definitions.InvalidSource):
        lilo_definitions.resolve_source(source)


# The matched raw-Miles run.


def options(arguments):
    """Option -> its value, or True."""
    found: dict[str, object] = {}
    for argument, after in zip(arguments, (*arguments[1:], "--"), strict=True):
        if argument.startswith("--"):
            found[argument] = True if after.startswith("--") else after
    return found


def test_the_baseline_of_the_256k_definition_has_its_layout_lengths_and_adapters():
    given = options(miles_args(lilo_definitions.get(BIG)))
    assert given["--hf-checkpoint"] == given["--load"] == "Qwen/Qwen3.8-27B"
    assert (given["--actor-num-nodes"], given["--actor-num-gpus-per-node"]) == ("2", "8")
    degrees = [given[f"--{axis}-model-parallel-size"] for axis in ("tensor", "pipeline", "expert")]
    assert degrees == ["2", "1", "1"]
    assert given["--context-parallel-size"] == "8"
    assert given["--distributed-timeout-minutes"] == "120"
    assert (given["--seq-length"], given["--max-tokens-per-gpu"]) == ("262144", "32768")
    assert (given["--lora-rank"], given["--lora-alpha"]) == ("32", "32")
    assert given["--target-modules"] == "linear_qkv,linear_proj,linear_fc1,linear_fc2"
    assert given["--recompute-granularity"] == "full"
    assert given["--sequence-parallel"] is True
    assert given["--rollout-num-gpus"] == "0"


@pytest.mark.parametrize("name", [row[0] for row in MATCHED])
def test_every_matched_definition_has_a_baseline_of_known_options(name):
    given = options(miles_args(lilo_definitions.get(name), ["--lr-decay-style", "constant"]))
    free = {"--lr", "--lr-decay-style", "--no-gradient-accumulation-fusion", "--attention-backend"}
    free |= {"--attention-dropout", "--hidden-dropout", "--attention-softmax-in-fp32"}
    assert set(given) - free <= set(OWNED)


@pytest.mark.parametrize(
    "option",
    [*OWNED, "--seq-length=5", "--tensor-model-par", "--context=4", "--lora-r"],
)
def test_what_the_definition_decides_cannot_be_set_beside_it(option):
    with pytest.raises(
        lilo_definitions.InvalidDefinition, match=re.escape(option.partition("=")[0])
    ):
        miles_args(lilo_definitions.get(BIG), [option, "1"])


@pytest.mark.parametrize(
    "changes",
    [{"trainer": {"keep_activations": "qkv"}}, {"lora": {"alpha": 0.5}}],
)
def test_what_raw_miles_cannot_match_is_refused(changes):
    with pytest.raises(lilo_definitions.InvalidDefinition, match=next(iter(changes))):
        miles_args(lilo_definitions.get(BIG).derive(**changes))


@pytest.mark.parametrize(
    "name", ["tiny", "qwen3_0_6b", "smollm2_135m", "qwen3_5_9b_base_miles_lora_16k", BIG]
)
def test_adapters_have_the_parameters_that_the_trainer_gives_them(name, tmp_path):
    from lilo_miles_backend.families.read import read_shape
    from lilo_miles_backend.ranks.sites import lora_sites

    one = Job.of(lilo_definitions.get(name))
    config = meta_models.build(one.architecture).config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    shape = read_shape(tmp_path)

    linears = [
        module.linear
        for site in lora_sites(shape)
        if site.group in one.targets
        for module in site.modules
    ]

    trained = sum(one.lora_rank * (each.in_features + each.out_features) for each in linears)
    assert adapter_parameters(one) == trained
