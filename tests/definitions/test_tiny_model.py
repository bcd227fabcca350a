"""The model that ships: its tokenizer is exact, its files are what the scripts write, and it half knows its sums."""

import json
import subprocess
import sys
from pathlib import Path

import lilo_definitions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = lilo_definitions.resolve_source(lilo_definitions.get("tiny").model.source)
SPECIAL = ("<begin>", "<end>", "<pad>", "<unused>")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(FOLDER), local_files_only=True)


@settings(max_examples=200)
@given(text=st.text(max_size=60).filter(lambda text: not any(mark in text for mark in SPECIAL)))
def test_every_text_is_its_bytes_and_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_byte_has_the_id_of_its_value(tokenizer):
    every = "".join(map(chr, range(1, 0x300))) + "\0\N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-6F22}"
    assert tokenizer.encode(every) == list(every.encode())
    assert len(tokenizer) == 260 == lilo_definitions.get("tiny").model.vocab_size


def test_special_tokens_have_the_ids_of_the_model(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [256, 257, 258, 259]
    assert tokenizer.bos_token_id == config["bos_token_id"] == 256
    assert tokenizer.eos_token_id == config["eos_token_id"] == 257
    assert tokenizer.pad_token_id == config["pad_token_id"] == 258


def test_special_tokens_are_left_out_of_text_and_text_is_not_taken_for_them(tokenizer):
    assert tokenizer.decode([72, 105, 257], skip_special_tokens=True) == "Hi"
    assert tokenizer.encode("<end>", split_special_tokens=True) == list(b"<end>")


def test_a_chat_becomes_turns_that_end(tokenizer):
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids == [256, *b"user\n1+1", 257, 256, *b"assistant\n2", 257]
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    assert asked == ids[: len(asked)]


def test_the_tokenizer_files_are_what_the_script_writes(tmp_path):
    script = ROOT / "scripts" / "make_tiny_tokenizer.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=30, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_the_model_mostly_knows_sums_and_seldom_says_them():
    import importlib.util

    import torch
    from transformers import Qwen3ForCausalLM

    spec = importlib.util.spec_from_file_location("make", ROOT / "scripts" / "make_tiny_model.py")
    make = importlib.util.module_from_spec(spec)
    sys.modules["make"] = make  # dataclasses look their module up
    try:
        spec.loader.exec_module(make)
        torch.manual_seed(0)
        model = Qwen3ForCausalLM.from_pretrained(FOLDER, local_files_only=True)
        # The bounds leave room for the draw: 256 questions, one standard error is 0.02 to 0.03.
        assert make.accuracy(model, greedy=False) < 0.25
        assert make.accuracy(model, greedy=True) > 0.60
    finally:
        del sys.modules["make"]


def test_the_model_is_the_one_its_config_describes():
    from safetensors import safe_open

    config = lilo_definitions.read_model_config(FOLDER)
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 (no iterator)
    assert shapes["model.embed_tokens.weight"] == (config.vocab_size, config.hidden_size)
    assert "lm_head.weight" not in shapes, "tied to the embedding"
    assert (
        sum(rows * (columns[0] if columns else 1) for rows, *columns in shapes.values()) < 900_000
    )
