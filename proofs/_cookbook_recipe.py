"""Runs one recipe of tinker-cookbook as its authors wrote it, on local data: `_cookbook_recipe.py RECIPE key=value...`.

What a recipe would fetch (a data set, a tokenizer, the renderer of a known model) is registered from outside first.
"""

# The cookbook and its needs are installed for the proof alone.
# pyright: reportMissingImports=false

import runpy
import sys
from typing import Any

import datasets
import pyarrow as pa
from lilo_definitions import get, resolve_source
from tinker import ModelInput
from tinker_cookbook import model_info, renderers, tokenizer_utils
from tinker_cookbook.renderers.role_colon import RoleColonRenderer
from transformers import AutoTokenizer

ROWS = 64


class Boxed(RoleColonRenderer):
    """Asks for the sum alone, and reads any sample as an answer, 0 or 1 by the parity of its tokens.

    A tiny model goes on with a sum in several ways, and so is rewarded at times; with a whole prompt it says nothing.
    """

    def build_generation_prompt(self, messages: list[Any], *_: object, **__: object) -> Any:
        """What is left of the last message up to its equals sign."""
        question = messages[-1]["content"].partition("=")
        return ModelInput.from_ints(self.tokenizer.encode("".join(question[:2])))

    def parse_response(self, response: list[int]) -> Any:
        """The sampled tokens as a message."""
        message, ended = super().parse_response(response)
        return {**message, "content": f"\\boxed{{{sum(response) % 2}}}"}, ended


def conversations() -> list[dict[str, Any]]:
    """Sums, as a chat."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{n}+{n}="},
                {"role": "assistant", "content": str(2 * n)},
            ]
        }
        for n in range(ROWS)
    ]


def problems() -> list[dict[str, str]]:
    """Questions with the answer where the recipe looks for it."""
    return [{"question": f"{n}+{n}=", "answer": f"#### {n % 2}"} for n in range(ROWS)]


def load_dataset(path: str, *_: object, **__: object) -> datasets.DatasetDict:
    """What a recipe asks the hub for."""
    rows = conversations() if "robots" in path else problems()
    # A fingerprint of its own: the computed one pickles a table, which not every pair of versions can.
    table = pa.Table.from_pylist(rows)
    return datasets.DatasetDict({"train": datasets.Dataset(table, fingerprint="local")})


def main() -> None:
    """Register, then run the recipe's own entry point with the arguments that are left."""
    folder = str(resolve_source(get("tiny").model.source))
    datasets.load_dataset = load_dataset
    tokenizer_utils.register_tokenizer("tiny", lambda: AutoTokenizer.from_pretrained(folder))
    renderers.register_renderer("boxed", lambda tokenizer, _: Boxed(tokenizer))
    model_info.get_recommended_renderer_name = lambda _: "boxed"
    recipe = sys.argv.pop(1)
    runpy.run_module(f"tinker_cookbook.recipes.{recipe}", run_name="__main__")


if __name__ == "__main__":
    main()
