"""`lilo doctor`: what is installed, which devices there are, what would run here, and what to do about the rest.

Works with lilo-engine alone. Exit code 0 if nothing is wrong, 1 if there is a problem. Presentation only: the questions
are in `findings`, the measuring in `machine`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lilo_engine.cli import findings
from lilo_engine.cli.findings import Finding
from lilo_engine.cli.machine import look

_MARKS = {
    "good": "[green]good[/green]",
    "note": "[yellow]note[/yellow]",
    "problem": "[red]problem[/red]",
}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of a table.")
    ] = False,
) -> None:
    """Check this machine and this environment, and say what to do about what is wrong."""
    found = examine()
    problems = [finding for finding in found if finding.state == "problem"]
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    else:
        _show(found, len(problems))
    if problems:
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Every finding, in the order they are shown."""
    machine = look()
    return [
        *findings.of_software(with_gpu=bool(machine.torch.devices)),
        *findings.of_machine(machine),
        *findings.of_sockets(),
        *findings.of_plug_ins(machine),
        *findings.of_definitions(machine),
    ]


def _show(found: list[Finding], num_problems: int) -> None:
    """The table for people; advice stands under what it is about."""
    console = Console(highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold", max_width=24)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for finding in found:
        shown = escape(finding.found)
        if finding.advice:
            shown += f"\n[dim]-> {escape(finding.advice)}[/dim]"
        heading = finding.section if finding.section != section else ""
        section = finding.section
        table.add_row(heading, finding.subject, _MARKS[finding.state], shown)
    console.print(table)
    console.print(f"{num_problems} problems" if num_problems else "no problems")
