"""`lilo report RUN`: where the time of a run went, alone or against an earlier report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from lilo_engine.cli.console_client import DEFAULT_URL, ApiKey, BaseUrl, ask
from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.console.run_report import RunReport

_ROWS = {
    "wall_s": ("wall time", "{:,.1f} s"),
    "train_s": ("training", "{:,.1f} s"),
    "other_s": ("not training", "{:,.1f} s"),
    "assemble_share": ("assembling saves", "{:.2%} of the wall time"),
    "publish_share": ("publishing, beside training", "{:.2%} of the wall time"),
    "steps": ("optimizer steps", "{:,}"),
    "passes": ("passes", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "tokens_per_device_s": ("tokens per device and second", "{:,.0f}"),
    "datums": ("datums", "{:,}"),
    "mean_tokens": ("mean length", "{:,.1f} tokens"),
    "longest_tokens": ("longest", "{:,} tokens"),
    "truncated_share": ("datums that fill the context", "{:.2%}"),
}
"""Field -> its name for people, and its form."""


def report(
    run: Annotated[str, typer.Argument(help="A run's id, or a file that --json wrote.")],
    against: Annotated[
        Path | None, typer.Option(help="Compare with this file.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, which --against reads.")
    ] = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Where the time of a run went."""
    with problems_in_one_line():
        path = Path(run)
        own = _read(path) if path.is_file() else _parse(_ask(base_url, run, api_key), base_url)
        other = None if against is None else _read(against)
        if as_json:
            print(json.dumps(own.as_dict(), indent=2))
        else:
            _print(own, other)


def _ask(base_url: str, run: str, api_key: str | None) -> object:
    return ask(base_url, f"console/runs/{run}", api_key)


def _read(path: Path) -> RunReport:
    try:
        return _parse(json.loads(path.read_text("utf-8")), str(path))
    except ValueError as error:
        raise Problem(
            f"{path} is not a report: {error}; `lilo report RUN --json` makes one"
        ) from error


def _parse(document: object, where: str) -> RunReport:
    try:
        return TypeAdapter(RunReport).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise Problem(f"{where} is not a report: {first['loc']}: {first['msg']}") from error


def _print(own: RunReport, other: RunReport | None) -> None:
    table = Table(title=f"run {own.run_id}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    if other is not None:
        table.add_column(f"run {other.run_id}", justify="right")
        table.add_column("ratio", justify="right")
    for name, (words, form) in _ROWS.items():
        value = getattr(own, name)
        row = [words, form.format(value)]
        if other is not None:
            before = getattr(other, name)
            row += [form.format(before), f"{value / before:.2f}" if before else "-"]
        table.add_row(*row)
    # Between colons stands "train", which rich would draw.
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    for span, count in own.lengths.items():
        console.print(f"  {span} tokens: {count:,} datums")
