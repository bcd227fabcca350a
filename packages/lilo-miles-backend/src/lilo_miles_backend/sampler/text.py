"""StopStrings: whether the text of the newest tokens holds a stop string. The only reader of `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_SLACK_TOKENS = 8
"""Room in the window for tokens that decode to nothing."""


class StopStrings:
    """Stop strings of one request.

    Only a window of the newest tokens is decoded: a token holds a byte at least, so a string of n bytes spans n tokens
    at most. Looking after every token finds a string at the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        """Neither copies nor caches text."""
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        longest = max((len(string.encode()) for string in strings), default=0)
        self._window = longest + _SLACK_TOKENS

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether the end of the generated `tokens` (never the prompt) holds one of the strings."""
        text = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer beside the model, or None when there is none."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None
