"""Sampler snapshots: what PEFT loads and computes is what the adapter says; an empty one is never published."""

import dataclasses
import io
import json
import logging
import os

import pytest
import safetensors.torch
import torch
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_engine.operations.lora_metadata import lora_from_metadata
from lilo_miles_backend.checkpoints import persist_sampler
from lilo_miles_backend.checkpoints.safetensors_file import write_safetensors
from lilo_miles_backend.checkpoints.sampler import peft_tensors
from lilo_volume import SoloGroup, catalogue
from lilo_volume.testing import run_ranks
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.miles_backend.checkpoints.conftest import destination, make_state

ALPHA = 16.0
TOLERANCE = 1e-5
"""Logits are of order 10 in float32; merging and adding round differently."""
TOKENS = torch.arange(40).view(2, 20) % 256


def snapshot(volume, state, **options):
    return persist_sampler(volume, SoloGroup(), state, destination("sampler_weights", **options))


def merged_logits(folder, state):
    """By hand: every adapted linear's weight plus alpha / rank times B A; the head untied from the embedding."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    scale = ALPHA / state.spec.lora_rank
    with torch.no_grad():
        for name in {key.rpartition(".")[0] for key in state.weights}:
            weight = model.get_submodule(name).weight
            weight += scale * (state.weights[f"{name}.lora_B"] @ state.weights[f"{name}.lora_A"])
        return model(TOKENS).logits


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("unembed", [True, False])
def test_peft_loads_a_snapshot_and_computes_the_same(volume, tiny_folder, unembed, recwarn):
    state = make_state(unembed=unembed)
    published = snapshot(volume, state)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        plain = base(TOKENS).logits
    model = PeftModel.from_pretrained(base, published.folder)
    assert not [w for w in recwarn if "missing" in str(w.message).lower()]
    with torch.no_grad():
        logits = model(TOKENS).logits
    wanted = merged_logits(tiny_folder, state)
    assert (logits - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    assert (logits - plain).abs().max() > 0.01 * plain.abs().max()
    loaded = {k for k, _ in model.named_parameters() if "lora_" in k}
    assert len(loaded) == len(state.weights)


def test_a_snapshot_has_pefts_names_and_exactly_the_modules_there_are(volume, state):
    published = snapshot(volume, state)
    tensors = load_file(os.path.join(published.folder, "adapter_model.safetensors"))
    assert {
        key.removeprefix("base_model.model.").removesuffix(".weight") for key in tensors
    } == set(state.weights)
    assert all(key.startswith("base_model.model.") and key.endswith(".weight") for key in tensors)
    for name, tensor in state.weights.items():
        assert torch.equal(tensors[f"base_model.model.{name}.weight"], tensor)
    with open(os.path.join(published.folder, "adapter_config.json"), encoding="utf-8") as file:
        config = json.load(file)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (8, 16, "LORA")
    assert config["target_modules"] == sorted({name.split(".")[-2] for name in state.weights})
    attention = {k: t for k, t in state.weights.items() if "self_attn" in k}
    published = snapshot(volume, dataclasses.replace(state, weights=attention), name="attention")
    with open(os.path.join(published.folder, "adapter_config.json"), encoding="utf-8") as file:
        assert json.load(file)["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_an_empty_or_halved_adapter_is_refused_and_nothing_is_published(volume, state):
    half = {k: t for k, t in state.weights.items() if k != "lm_head.lora_B"}
    for weights in ({}, half):
        with pytest.raises(CommandFailed):
            snapshot(volume, dataclasses.replace(state, weights=weights))
    assert catalogue(volume) == []


def test_an_adapter_that_learnt_nothing_is_published_and_said(volume, state, caplog):
    zeros = {k: torch.zeros_like(t) if k.endswith("B") else t for k, t in state.weights.items()}
    with caplog.at_level(logging.WARNING):
        snapshot(volume, dataclasses.replace(state, weights=zeros))
    assert "only zeros" in caplog.text
    caplog.clear()
    snapshot(volume, dataclasses.replace(state, weights=zeros, optimizer_step=0), name="fresh")
    assert not caplog.text


def test_a_snapshot_of_a_taken_name_is_refused_and_the_first_stays(volume, state):
    first = snapshot(volume, state)
    with pytest.raises(InvalidRequest):
        snapshot(volume, state)
    (found,) = catalogue(volume)
    assert found.manifest.digest == first.digest
    assert lora_from_metadata(found.manifest.metadata) == state.spec


def test_rank_zero_writes_for_all(volume, state):
    outcomes = run_ranks(
        2, lambda group: persist_sampler(volume, group, state, destination("sampler_weights"))
    )
    assert outcomes[0] == outcomes[1]
    (found,) = catalogue(volume)
    assert [receipt.files != () for receipt in found.manifest.receipts] == [True, False]


def test_the_file_is_byte_for_byte_that_of_safetensors(state):
    tensors = peft_tensors(state) | {'\u00e9 "odd" \\ name': torch.ones(2, 3)}
    written = io.BytesIO()
    write_safetensors(written, tensors, {"format": "pt"})
    assert written.getvalue() == safetensors.torch.save(tensors, metadata={"format": "pt"})
