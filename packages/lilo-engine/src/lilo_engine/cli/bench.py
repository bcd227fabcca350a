"""`lilo bench engine`: what the engine costs on this machine; with `--simulate`, how it shares among thousands.

Other packages add what they measure through the entry-point group `lilo.benches`, a function each: `lilo bench trainer`
and `lilo bench sampler` are lilo-miles-backend's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, cast

import typer
from lilo_definitions import get
from rich.console import Console
from rich.table import Table

from lilo_engine.bench.run import NAMES, run
from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.simulate.plot import svg
from lilo_engine.simulate.simulation import Simulation
from lilo_engine.simulate.trace import Figures
from lilo_engine.simulate.workload import Workload

app = typer.Typer(
    name="bench",
    help="Measure the engine, the trainer and the sampler on this machine.",
    no_args_is_help=True,
    add_completion=False,
)

GROUP = "lilo.benches"


def _add_others(app: typer.Typer) -> None:
    """The measurements of other packages; without any, how to get them."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    for point in points:
        app.command(point.name)(point.load())
    for name in () if points else ("sampler", "trainer"):
        app.command(name)(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    def missing() -> None:
        """Comes with lilo-miles-backend."""
        typer.echo(f"lilo bench {name}: pip install 'lilo-miles-backend[bench]'", err=True)
        raise typer.Exit(1)

    return missing


@app.callback()
def bench() -> None:
    """Measure the engine, the trainer and the sampler on this machine."""


@app.command("engine")
def engine(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Synthetic clients and time; the real scheduler.")
    ] = False,
    section: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this; again for more: {', '.join(NAMES)}.", show_default=False),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=100_000, help="Synthetic clients.")] = 1000,
    work_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each of them trains on.")
    ] = 65536,
    definition: Annotated[str, typer.Option(help="Whose limits hold.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal runs.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Write an SVG picture here.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Steps, parked calls, waiting futures, long requests, slots; or many simulated clients.

    Measures a server of its own with a trainer that computes nothing, so that only the engine's part is seen.
    """
    with problems_in_one_line():
        if simulate:
            workload = Workload(clients=clients, work_tokens=work_tokens, seed=seed)
            _simulate(definition, workload, plot, as_json=as_json)
            return
        _measure(tuple(section or NAMES), as_json=as_json)


def _measure(names: tuple[str, ...], *, as_json: bool) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise Problem(f"there is no section {unknown[0]!r}; there are {', '.join(NAMES)}")
    report = run(names)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    table = Table(title="engine with a trainer that computes nothing")
    for title in ("section", "case", "figures"):
        table.add_column(title)
    for name, figures in report.items():
        loose = {case: value for case, value in figures.items() if not isinstance(value, dict)}
        for case, values in figures.items():
            if isinstance(values, dict):
                table.add_row(name, case, _figures(cast("dict[str, float]", values)))
        if loose:
            table.add_row(name, "", _figures(loose))
    Console(highlight=False).print(table)


def _figures(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in values.items())


def _simulate(definition: str, workload: Workload, plot: Path | None, *, as_json: bool) -> None:
    limits = get(definition).limits
    started = time.perf_counter()
    trace = Simulation(workload=workload, limits=limits).run()
    took_s = time.perf_counter() - started
    figures = trace.figures()
    if plot is not None:
        plot.write_text(svg(trace, figures), "utf-8")
    if as_json:
        print(json.dumps({**figures.as_dict(), "took_s": took_s}, indent=2))
    else:
        Console(highlight=False).print(_table(figures, took_s))


def _table(figures: Figures, took_s: float) -> Table:
    title = f"{figures.clients:,} clients, {figures.simulated_s:,.0f} s simulated in {took_s:.1f} s"
    table = Table(title=title)
    for name in ("what", "figure", ""):
        table.add_column(name)
    table.add_row("operations", f"{figures.operations:,}", f"in {figures.plans:,} plans")
    ratio, fill = figures.progress_ratio, figures.fill
    table.add_row(
        "progress, most to least",
        "-" if ratio is None else f"{ratio:.3f}",
        f"last end / first end {figures.last_end_s / figures.first_end_s:.3f}",
    )
    table.add_row("passed over", f"{figures.bypass:,}", f"at most {figures.bypass_bound:,}")
    table.add_row(
        "batch fill", "-" if fill is None else f"{100 * fill:.1f} %", "while more could have joined"
    )
    for kind, waits in figures.wait_s.items():
        rest = ", ".join(f"{name} {value:.2f} s" for name, value in waits.items() if name != "p50")
        table.add_row(f"wait of {kind}", f"{waits['p50']:.2f} s", rest)
    for lane, use in figures.lane_use.items():
        table.add_row(f"{lane} lane", f"{100 * use:.1f} %", "of the time")
    return table


_add_others(app)
