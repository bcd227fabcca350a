"""A tiny random Qwen3 with a byte tokenizer, for servers that want a folder (`tinker_load.py --make-model DIR`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_model(folder: Path, seed: int = 0) -> None:
    """Write the model and its tokenizer; needs torch and transformers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        bos_token="<|bos|>",
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    special: dict[str, Any] = {
        f"{name}_token_id": getattr(fast, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **special,
    )
    model = Qwen3ForCausalLM(config).float()
    model.config.dtype = torch.float32
    model.save_pretrained(folder, safe_serialization=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"path": str(folder), "params": count, "vocab": config.vocab_size}))
