"""Writes the table of docs/definitions.md from the definitions: `python scripts/definitions_table.py [--check]`.

With `--check` it writes nothing and exits with 1 if the table is not what the definitions say.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lilo_definitions
from lilo_definitions import Definition
from lilo_definitions.planner import Job, beside_sampler, make_plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "definitions.md"
START, END = "<!-- table: start -->", "<!-- table: end -->"
HEAD = (
    "| definition | base model | context | adapters | layout | keeps | peak GB per rank | sampler | digest |",
    "|---|---|---|---|---|---|---|---|---|",
)


def row(definition: Definition) -> str:
    """One definition."""
    topology, lora, pool = definition.topology, definition.lora, definition.sampler.pool
    plan = make_plan(beside_sampler(Job.of(definition), definition))
    where = "1 CPU rank"
    if topology.device == "cuda":
        gpus = f"{topology.nodes} x {topology.gpus_per_node} {topology.gpu}"
        where = f"{gpus}, TP{topology.tp} CP{topology.cp} DP{topology.dp}"
    sampler = definition.sampler.engine
    if pool is not None:
        least = "" if pool.min_replicas == pool.max_replicas else f"{pool.min_replicas} to "
        sampler += f", {least}{pool.max_replicas} x {pool.gpus_per_replica} {pool.gpu}"
    cells = (
        f"`{definition.name}`",
        f"`{definition.model.name}`",
        f"{definition.context:,}",
        f"{lora.slots} of rank {lora.max_rank}, {'+'.join(lora.targets)}",
        where,
        plan.keep,
        f"{plan.memory.peak / 1e9:.1f}",
        sampler,
        f"`{lilo_definitions.digest(definition)[:12]}`",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The whole table, ending with a line break."""
    rows = [row(lilo_definitions.get(name)) for name in lilo_definitions.names()]
    return "\n".join((*HEAD, *rows)) + "\n"


def page(text: str) -> str:
    """The page with the table in it."""
    before, _, rest = text.partition(f"{START}\n")
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}{END}{after}"


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text("utf-8")
    wanted = page(text)
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print(
                f"{PAGE} is out of date; run python scripts/definitions_table.py", file=sys.stderr
            )
        return int(wanted != text)
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
