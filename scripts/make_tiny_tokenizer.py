"""Writes the byte tokenizer of the tiny model: ids 0 to 255 are byte values, then four special tokens.

    python scripts/make_tiny_tokenizer.py packages/lilo-definitions/src/lilo_definitions/data/tiny

A byte-level BPE without a single merge, in the `tokenizer.json` form that transformers loads: every text is its UTF-8
bytes, and comes back exactly. No token is added around a text; the chat template adds them. Running it again writes the
same bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END, PAD, UNUSED = "<begin>", "<end>", "<pad>", "<unused>"
SPECIAL = {BEGIN: 256, END: 257, PAD: 258, UNUSED: 259}
"""<unused> only makes the vocabulary the size of the embedding, so that every id the model can emit has a text."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<begin>' + message['role'] + '\\n' + message['content'] + '<end>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<begin>assistant\\n' }}{%- endif %}"
)
"""One turn is <begin>ROLE, a line end, the content, <end>; generation stops at <end>."""


def byte_characters() -> list[str]:
    """The character that the byte-level pre-tokenizer shows for each byte value.

    Printable Latin-1 characters stand for themselves, the other 68 bytes are moved to U+0100 and up in order: the
    convention of the byte-level pre-tokenizer in the `tokenizers` library.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(moved)) for value in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **flags, "special": True}
            for text, number in SPECIAL.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: value for value, text in enumerate(byte_characters())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Write both files into the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="the model folder to write into")
    folder: Path = parser.parse_args().folder
    for name, content in (
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
        print(folder / name)


if __name__ == "__main__":
    main()
