"""`lilo deploy NAME`: rented machines for a definition. `--dry-run` prints what would be created, without an account.

Presentation only; `lilo_engine.deploy` decides what is created.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from lilo_definitions import architecture_of, get
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.deploy import Deployment, FunctionPlan, plan

_SHOWN = 60
"""Characters of a variable's value in the table; `--json` has all of it."""


def deploy(
    definition: Annotated[str, typer.Argument(help="As `lilo definitions list` shows it.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be created, and its cost.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of tables.")
    ] = False,
    wheels: Annotated[
        Path | None,
        typer.Option(help="Folder with our wheels (make build); else released ones are installed."),
    ] = None,
    python: Annotated[str, typer.Option(help="Python of the container images.")] = "3.12",
    run: Annotated[
        str | None,
        typer.Option(help="Start this run when deployed; a name goes on with its state."),
    ] = None,
) -> None:
    """Rent machines for a definition; --dry-run prints what would be created."""
    with problems_in_one_line():
        chosen = get(definition)
        if refusals := architecture_of(chosen).undivided(chosen.topology.tp):
            raise Problem(f"{chosen.name} would be refused at start: {'; '.join(refusals)}")
        planned = plan(chosen, wheels=str(wheels) if wheels else None, python=python)
        _check_wheels(planned, wheels)
        if as_json:
            print(json.dumps(_as_json(planned), indent=2))
        else:
            _show(planned)
        if not dry_run:
            _create(planned, run)


def _create(planned: Deployment, run: str | None) -> None:
    try:
        from lilo_engine.deploy import modal
    except ImportError as error:
        raise Problem(
            f"deploying needs Modal's client ({error}): pip install 'lilo-engine[modal]'; "
            "--dry-run works without it"
        ) from error
    built = modal.build(planned)
    page = modal.deploy(built)
    typer.echo(f"lilo: deployed {planned.app}: {page}", err=True)
    if run is not None:
        call = modal.start_run(built, run)
        typer.echo(
            f"lilo: run {run} starts ({call}); its address will stand in the dictionary {planned.urls}: "
            f"modal dict get {planned.urls} {run}",
            err=True,
        )


def _check_wheels(planned: Deployment, folder: Path | None) -> None:
    if folder is None:
        return
    missing = [
        own.wheel for own in planned.trainer.image.ours if not (folder / own.wheel).is_file()
    ]
    if missing:
        raise Problem(f"{folder} has no {', '.join(missing)}; `make build` writes wheels to dist/")


def _as_json(planned: Deployment) -> dict[str, object]:
    """Everything, with the sums that a reader would do first."""
    return {
        **asdict(planned),
        "volumes": list(planned.volumes),
        "usd_per_hour": {
            "trainer": round(planned.cost.trainer_usd, 2),
            "least": round(planned.cost.least_usd, 2),
            "most": round(planned.cost.most_usd, 2),
            "prices_of": planned.cost.prices_of,
        },
    }


def _show(planned: Deployment) -> None:
    console = Console(highlight=False)
    console.print(
        f"[bold]{planned.app}[/bold] from {planned.definition}, digest {planned.digest[:16]}"
    )
    for function in filter(None, (planned.trainer, planned.sampler)):
        console.print(_table(function))
    names = ", ".join(planned.volumes)
    console.print(f"\nvolumes      {names} (made if missing)", soft_wrap=True)
    console.print(f"addresses    dictionary {planned.urls}: run -> URL", soft_wrap=True)
    cost = planned.cost
    console.print(
        f"cost         ${cost.trainer_usd:,.2f} an hour for the trainer, ${cost.least_usd:,.2f} to "
        f"${cost.most_usd:,.2f} with the pool; estimated from list prices noted in {cost.prices_of}",
        soft_wrap=True,
    )
    for note in planned.notes:
        console.print(f"note         {note}", soft_wrap=True)


def _table(function: FunctionPlan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(f"\n[bold]function {function.name}[/bold]", "")
    for name, value in _rows(function):
        table.add_row(f"  {name}", escape(value))
    return table


def _rows(function: FunctionPlan) -> list[tuple[str, str]]:
    size = function.cluster_size
    containers = f"cluster of {size}, RDMA {'on' if function.rdma else 'off'}" if size > 1 else "1"
    if function.max_containers is not None:
        containers = f"{function.min_containers} to {function.max_containers}, idle ones end after {function.scaledown_s} s"
    rows = [
        ("containers", containers),
        ("gpu", f"{function.gpu_text or 'none'} each"),
        ("host", f"{function.cpus:g} cores, {function.memory_mib / 1024:g} GiB each"),
        ("limits", f"{function.timeout_s} s, start {function.startup_timeout_s} s"),
        (
            "tries",
            f"{function.retries + 1}{', each container used once' * function.single_use_containers}",
        ),
    ]
    if function.max_inputs is not None:
        rows.append(("inputs", f"aims at {function.target_inputs}, takes {function.max_inputs}"))
    image = function.image
    packages = [*image.packages, *(own.requirement for own in image.ours)]
    where = f", ours from {image.wheels}" if image.wheels else ""
    rows.append(
        (
            "image",
            f"{image.base or 'Debian'}, Python {image.python}: {', '.join(packages)}{where}",
        )
    )
    rows += [
        (mount.path, f"{mount.volume}{' (read-only)' * mount.read_only}")
        for mount in function.mounts
    ]
    rows.append(("secrets", ", ".join(function.secrets) or "none"))
    rows += [(name, _short(value)) for name, value in function.environment.items()]
    return rows


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"
