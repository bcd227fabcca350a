"""`lilo bench sampler`: the embedded sampler's speed beside transformers' `generate` and PEFT in the same run."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer
from lilo_definitions import Definition, get
from lilo_engine.cli.problems import Problem, problems_in_one_line
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lilo_miles_backend.bench.sampler import Report


def sampler(
    definition: Annotated[
        str, typer.Option(help="Whose model; a name or a file, as `lilo serve` takes it.")
    ] = "tiny",
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu; the definition's own.", show_default=False),
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this; again for more: one_prompt, many_prompts, adapters, prefill, publish.",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=256, help="So many at once; again for more: 1, 8, 32.", show_default=False
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each sequence.")] = 64,
    long_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of the prompt that is prefilled: 4,096 on CPU, 16,384 on a GPU, if the context has room.",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[int, typer.Option(min=2, max=32, help="Side by side.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Turns of each method; the best counts.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Tokens a second of 1, 8 and 32 sequences, of several adapters, a long prompt, and the way of new weights to a token.

    Ours, PEFT with adapters beside the weights, and merged weights, with the same adapters and prompts. On CPU one torch
    thread each, and ratios of CPU seconds, so that other programs disturb little.
    """
    with problems_in_one_line():
        # Imports torch, transformers and Megatron, which only this command needs.
        from lilo_miles_backend.bench.sampler import SECTIONS, Workload, measure

        logging.getLogger("megatron").setLevel(logging.WARNING)
        wanted = tuple(section or SECTIONS)
        if unknown := [name for name in wanted if name not in SECTIONS]:
            raise Problem(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
        workload = Workload(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            long_tokens=long_tokens,
            counts=tuple(sequences or Workload().counts),
            adapters=adapters,
            rounds=rounds,
        )
        console = Console(stderr=True)
        report = measure(
            _on_device(get(definition), device),
            wanted,
            workload,
            told=lambda name: console.print(f"measuring {name.replace('_', ' ')}"),
        )
        if as_json:
            print(json.dumps(report, indent=2))
        else:
            Console(highlight=False).print(_table(report))


def _on_device(definition: Definition, device: str | None) -> Definition:
    """The definition on another device, if one is asked for; with one rank, as all of them are measured.

    Raises:
        Problem: there is no such device here.
    """
    import torch

    wanted = device or definition.topology.device
    if wanted not in ("cpu", "cuda"):
        raise Problem(f"there is no device {wanted!r}; choose cuda or cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Problem("torch finds no CUDA device here; use --device cpu")
    if wanted == definition.topology.device:
        return definition
    layout = {"gpu": None, "nodes": 1, "tp": 1, "cp": 1, "dp": 1, "rdma": False}
    return definition.derive(
        topology={**layout, "device": wanted, "gpus_per_node": 1 if wanted == "cuda" else 0},
        limits={
            "max_tokens_per_rank": max(definition.context, definition.limits.max_tokens_per_rank)
        },
    )


def _table(report: Report) -> Table:
    settings = report["settings"]
    off = report["agreement"]["largest_difference_of_logprobs"]
    table = Table(
        title=f"{settings['definition']} on {settings['device']}, {settings['dtype']}, "
        f"prompts of {settings['prompt_tokens']} and {settings['new_tokens']} new tokens; "
        f"logprobs differ by {off:.1g} at most",
        caption=f"ratios of {settings['ratios_are_of']}; above 1 ours is faster",
    )
    for title in ("section", "case", "ours", "PEFT", "merged", "against PEFT", "against merged"):
        table.add_column(title)
    for name, cases in report.items():
        if name in ("settings", "agreement"):
            continue
        for case, figures in cases.items():
            table.add_row(name.replace("_", " "), case, *_cells(figures))
    return table


def _cells(figures: dict[str, Any]) -> list[str]:
    """Wall figures of the three methods, then the ratios."""
    cells: list[str] = []
    for name in ("ours", "peft", "merged"):
        if f"{name}_tokens_per_s" in figures:
            cells.append(f"{figures[f'{name}_tokens_per_s']:,.0f} tokens/s")
        else:
            cells.append(f"{1000 * figures[f'{name}_s']:,.3g} ms")
    return [*cells, *(f"{figures[f'ours_against_{name}']:.2f}" for name in ("peft", "merged"))]
