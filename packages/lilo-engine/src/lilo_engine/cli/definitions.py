"""`lilo definitions`: what can be trained here, and with which numbers.

Presentation only; `lilo_definitions` knows the answers.
"""

from __future__ import annotations

import json
import shlex
from typing import Annotated, NoReturn

import lilo_definitions
import typer
from lilo_definitions import Definition, DefinitionError, Part
from rich.console import Console
from rich.table import Table
from rich.text import Text

app = typer.Typer(
    name="definitions",
    help="What can be trained: list the definitions, show one, print a matched baseline.",
    no_args_is_help=True,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]


@app.command("list")
def list_definitions(as_json: _Json = False) -> None:
    """List every installed definition."""
    try:
        found = [lilo_definitions.get(name) for name in lilo_definitions.names()]
    except DefinitionError as error:
        _fail(error)
    if as_json:
        print(json.dumps([_summary(definition) for definition in found], indent=2))
        return
    # Two lines each: names are long, and a terminal may have 80 columns.
    table = Table(box=None, pad_edge=False)
    table.add_column("name and summary")
    for title in ("context", "adapters", "ranks"):
        table.add_column(title, justify="right", no_wrap=True)
    for definition in found:
        table.add_row(
            Text.assemble((definition.name, "bold"), f"\n  {definition.summary}"),
            f"{definition.context:,}",
            f"{definition.lora.slots} of rank {definition.lora.max_rank}",
            f"{definition.topology.world_size} {definition.topology.device}",
        )
    Console(highlight=False, markup=False, emoji=False).print(table)


@app.command("show")
def show_definition(
    name: Annotated[str, typer.Argument(help="A name that `lilo definitions list` shows.")],
    as_json: _Json = False,
) -> None:
    """Show every field of one definition, and what it means."""
    try:
        definition = lilo_definitions.get(name)
    except DefinitionError as error:
        _fail(error)
    if as_json:
        content = definition.model_dump(mode="json")
        print(json.dumps({**content, "digest": lilo_definitions.digest(definition)}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("meaning", style="dim")
    for field, value, meaning in _rows(definition, depth=0):
        if field not in ("name", "summary"):
            table.add_row(field, value, meaning)
    table.add_row("digest", lilo_definitions.digest(definition)[:16], "Equal content, equal digest")
    console = Console(highlight=False, markup=False, emoji=False)
    heading = Text.assemble((definition.name, "bold"), f": {definition.summary}")
    console.print(heading, soft_wrap=True)
    console.print(table)


@app.command(
    "miles-args",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def show_miles_args(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A definition, or a YAML file.")],
    as_json: _Json = False,
) -> None:
    """Print the arguments of the matched raw-Miles run, one option a line; options of your own may follow NAME."""
    try:
        arguments = lilo_definitions.miles_args(lilo_definitions.get(name), context.args)
    except DefinitionError as error:
        _fail(error)
    if as_json:
        print(json.dumps(arguments))
        return
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(argument)
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    print("\n".join(lines))


def _summary(definition: Definition) -> dict[str, object]:
    """What `list --json` says of one definition."""
    return {
        "name": definition.name,
        "summary": definition.summary,
        "base_model": definition.model.name,
        "context": definition.context,
        "slots": definition.lora.slots,
        "max_rank": definition.lora.max_rank,
        "device": definition.topology.device,
        "world_size": definition.topology.world_size,
    }


def _rows(part: Part, depth: int) -> list[tuple[str, str, str]]:
    """Field, value and first sentence of the meaning; the fields of a part stand under its name."""
    rows: list[tuple[str, str, str]] = []
    meanings = part.meanings()
    for field in type(part).model_fields:
        value: object = getattr(part, field)
        name = "  " * depth + field
        meaning = meanings[field].split(". ")[0].rstrip(".")
        if isinstance(value, Part):
            rows += [(name, "", meaning), *_rows(value, depth + 1)]
        else:
            rows.append((name, _shown(value), meaning))
    return rows


def _shown(value: object) -> str:
    """A value as a person writes it in YAML, but for thousands."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] (isinstance leaves the element type open)
    return str(value)


def _fail(error: DefinitionError) -> NoReturn:
    """One line on stderr, exit code 1."""
    typer.echo(f"lilo definitions: {error}", err=True)
    raise typer.Exit(1)
