"""`lilo bench trainer`: the trainer's speed beside Hugging Face + PEFT in the same run, on CPU or on a GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from lilo_engine.cli.problems import Problem, problems_in_one_line
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lilo_miles_backend.bench.point import Point

_TITLES = ("setting", "tokens", "tokens/s", "GiB", "useful", "of 790 TFLOP/s")


def trainer(
    size: Annotated[
        list[str] | None,
        typer.Option(help="On CPU, only this: 1M, 10M or 60M; again for more.", show_default=False),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="On CPU: turns of each method; the best counts.")
    ] = 7,
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu; cuda where there is one.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help="On a GPU: the shape, 8b or 0.6b.")] = "8b",
    layers: Annotated[int, typer.Option(min=1, help="On a GPU: of its layers, how many.")] = 8,
    length: Annotated[
        list[int] | None,
        typer.Option(help="On a GPU, tokens of a row; again for more.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="On a GPU: write an SVG here.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Steps on random models, ours and Hugging Face + PEFT's, with the same clock.

    On CPU: forward and backward of one adapter and of four, one torch thread, by CPU seconds, so that other programs
    disturb little. On a GPU: one row a step with optimizer, speed and peak memory over its length.
    """
    with problems_in_one_line():
        import torch

        logging.getLogger("megatron").setLevel(logging.WARNING)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cpu":
            _on_cpu(tuple(size or ()), rounds, as_json=as_json)
        elif device != "cuda":
            raise Problem(f"there is no device {device!r}; choose cuda or cpu")
        elif not torch.cuda.is_available():
            raise Problem("torch finds no CUDA device here; use --device cpu")
        else:
            _on_gpu(model, layers, tuple(length or ()), plot, as_json=as_json)


def _on_cpu(wanted: tuple[str, ...], rounds: int, *, as_json: bool) -> None:
    # Imports torch, transformers and Megatron, which only this command needs.
    from lilo_miles_backend.bench.sizes import SIZES
    from lilo_miles_backend.bench.trainer import measure

    names = wanted or tuple(SIZES)
    if unknown := [name for name in names if name not in SIZES]:
        raise Problem(f"there is no size {unknown[0]!r}; there are {', '.join(SIZES)}")
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


def _on_gpu(
    model: str, layers: int, lengths: tuple[int, ...], plot: Path | None, *, as_json: bool
) -> None:
    import torch

    from lilo_miles_backend.bench.gpu import LENGTHS, measure
    from lilo_miles_backend.bench.plot import write_plot
    from lilo_miles_backend.bench.random_model import SHAPES

    if model not in SHAPES:
        raise Problem(f"there is no shape {model!r}; there are {', '.join(SHAPES)}")
    title = f"{layers} layers of {model}, LoRA rank 32, {torch.cuda.get_device_name()}"
    console = Console(stderr=True)
    points = measure(
        model, layers, lengths or LENGTHS, told=lambda point: console.print(_words(point))
    )
    if plot is not None:
        write_plot(points, plot, title)
    if as_json:
        print(json.dumps(points, indent=2))
    else:
        Console().print(_table(points, title))


def _words(point: Point) -> str:
    what = f"{point['setting']} at {point.get('tokens', 'any length')}"
    if "tok_s" in point:
        return f"{what}: {point['tok_s']:,.0f} tokens/s"
    return f"{what}: {point.get('error', 'out of memory')}"


def _table(points: Sequence[Point], title: str) -> Table:
    table = Table(title=title)
    for name in _TITLES:
        table.add_column(name)
    for point in points:
        first = (point["setting"], f"{point.get('tokens', '')}")
        if "tok_s" not in point:
            table.add_row(*first, point.get("error", "out of memory"))
            continue
        table.add_row(
            *first,
            f"{point['tok_s']:,.0f}",
            f"{point['peak_gib']:.1f}",
            f"{point['useful_tflops']:.0f} TFLOP/s",
            f"{100 * point['useful_share']:.0f} %",
        )
    return table
