"""Share: what of a console's documents concerns the models that one caller may see. Pure; for `requests/console.py`.

Commands that a caller shared with others stay, with the others' models and the plan's reason, which may name them, left
out; commands of others alone are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from typing import Any

_OWNER = re.compile(r'\{.*\bowner="([^"]*)"')
Sees = Callable[[str], bool]
"""Whether a model's id may be shown."""


def models_in(overview: dict[str, Any], trace: dict[str, Any]) -> set[str]:
    """Every model that the documents name; either may be empty."""
    rows = [*overview.get("queue", ()), *overview.get("models", ())]
    found = {row["model_id"] for row in rows}
    lists = [each["models"] for lane in _lanes(overview).values() for each in lane]
    lists += [event["args"]["models"] for event in trace.get("traceEvents", ()) if _is_span(event)]
    return found.union(*lists)


def share_of_overview(overview: dict[str, Any], sees: Sees) -> dict[str, Any]:
    """The queue, the lanes and the models without those of others."""
    lanes = {name: _commands(running, sees) for name, running in _lanes(overview).items()}
    return {
        **overview,
        "queue": [row for row in overview["queue"] if sees(row["model_id"])],
        "lanes": {**overview["lanes"], **lanes},
        "models": [row for row in overview["models"] if sees(row["model_id"])],
    }


def share_of_trace(trace: dict[str, Any], sees: Sees) -> dict[str, Any]:
    """The events without those of others alone."""
    kept: list[dict[str, Any]] = []
    for event in trace["traceEvents"]:
        if not _is_span(event):
            kept.append(event)
            continue
        for args in _commands([event["args"]], sees):
            name = f"{event['cat']} {args['models'][0]}"
            kept.append({**event, "name": name, "args": args})
    return {**trace, "traceEvents": kept}


def share_of_metrics(text: str, owners: Container[str]) -> str:
    """Prometheus' text without the lines of other owners."""
    lines = text.splitlines(keepends=True)
    found = [(line, _OWNER.search(line)) for line in lines]
    return "".join(line for line, owner in found if owner is None or owner.group(1) in owners)


def _lanes(overview: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The lanes without the figures beside them."""
    lanes: dict[str, Any] = overview.get("lanes", {})
    return {name: running for name, running in lanes.items() if isinstance(running, list)}


def _commands(commands: Iterable[dict[str, Any]], sees: Sees) -> list[dict[str, Any]]:
    """Those with a model that may be shown."""
    kept: list[dict[str, Any]] = []
    for command in commands:
        own = [model for model in command["models"] if sees(model)]
        if len(own) == len(command["models"]):
            kept.append(command)
        elif own:
            kept.append({**command, "models": own, "reason": "shared with models of others"})
    return kept


def _is_span(event: dict[str, Any]) -> bool:
    return event["ph"] == "X"
