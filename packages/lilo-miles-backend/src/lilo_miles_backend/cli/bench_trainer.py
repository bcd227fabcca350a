"""`lilo bench trainer`: tokens per CPU second of the trainer, beside Hugging Face + PEFT in the same run."""

from __future__ import annotations

import json
import logging
from typing import Annotated

import typer
from lilo_engine.cli.problems import Problem, problems_in_one_line
from rich.console import Console
from rich.table import Table


def trainer(
    size: Annotated[
        list[str] | None,
        typer.Option(help="Only this: 1M, 10M or 60M; again for more.", show_default=False),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Turns of each method; the best counts.")
    ] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Forward and backward of one adapter and of four, against Hugging Face + PEFT with one torch thread.

    Random models; the CPU seconds of this process count, so other programs disturb little.
    """
    with problems_in_one_line():
        # Imports torch, transformers and Megatron, which only this command needs.
        from lilo_miles_backend.bench.sizes import SIZES
        from lilo_miles_backend.bench.trainer import measure

        names = tuple(size or SIZES)
        if unknown := [name for name in names if name not in SIZES]:
            raise Problem(f"there is no size {unknown[0]!r}; there are {', '.join(SIZES)}")
        logging.getLogger("megatron").setLevel(logging.WARNING)
        report = measure(names, rounds)
        if as_json:
            print(json.dumps(report, indent=2))
            return
        table = Table(title="forward and backward, tokens per CPU second")
        for title in ("size", "figure", "value"):
            table.add_column(title)
        for name, figures in report.items():
            for figure, value in figures.items():
                table.add_row(name, figure.replace("_", " "), f"{value:,.3g}")
        Console().print(table)
