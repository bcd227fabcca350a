"""Agreement: what ranks say of themselves must be equal where a difference would show as wrong numbers or a hang. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lilo_engine.errors import BackendLost

from lilo_miles_backend.rank_commands import RankInfo


def check_agreement(infos: Sequence[RankInfo], driver: Mapping[str, str]) -> None:
    """Refuse ranks that differ from each other or from their driver.

    Args:
        infos: What each rank says of itself.
        driver: The driver's own facts: a variable that it has and no rank was given is a difference too.

    Raises:
        BackendLost: names every fact that differs, with the value of each rank as a table.
    """
    facts = [facts_of(info) for info in infos]
    names = dict.fromkeys(name for fact in (driver, *facts) for name in fact)
    differing = [
        name
        for name in names
        if len({fact.get(name, "-") for fact in facts}) > 1
        or (name in driver and facts[0].get(name) != driver[name])
    ]
    if differing:
        raise BackendLost(
            f"the ranks and their driver differ in {', '.join(differing)}; make their nodes equal and start again\n"
            + table(infos, driver, differing)
        )


def facts_of(info: RankInfo) -> dict[str, str]:
    """All that must be equal, by name, as text."""
    facts = dict(info.facts)
    facts["device"], facts["attention"] = info.device, info.attention
    facts.update(
        {f"limit of group {name}": f"{limit:g} s" for name, limit in info.group_limits_s.items()}
    )
    return facts


def table(infos: Sequence[RankInfo], driver: Mapping[str, str], names: Sequence[str]) -> str:
    """One line for the driver and for each rank: where it runs, and the facts by these names."""
    head = ("rank", "node", "pid", *names)
    rows = [("driver", "-", "-", *(driver.get(name, "-") for name in names))]
    rows += [
        (
            str(info.rank),
            info.node,
            str(info.pid),
            *(facts_of(info).get(name, "-") for name in names),
        )
        for info in infos
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )
