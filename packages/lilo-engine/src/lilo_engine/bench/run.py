"""Run: all sections, one after another, as one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import anyio

from lilo_engine.bench import sections
from lilo_engine.bench.scheduling import passes
from lilo_engine.bench.server import BenchServer, bench_server

_SERVED: Mapping[str, Callable[[BenchServer], dict[str, Any]]] = MappingProxyType(
    {
        "steps": lambda server: sections.steps(server.url, server.pid),
        "parked": sections.parked,
        "waiters": sections.waiters,
        "long_requests": lambda server: anyio.run(sections.long_requests, server),
    }
)
NAMES = (*_SERVED, "slots", "scheduling")
"""Sections, in their order."""


def run(names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Measure these sections, each against a server of its own.

    Returns:
        Section -> its numbers; and `ratios`: what should be flat, most against least.
    """
    report = {name: _section(name) for name in names}
    return {**report, "ratios": _ratios(report)}


def _ratios(report: Mapping[str, Any]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for name in ("parked", "waiters", "scheduling"):
        if name in report:
            rows = list(report[name].values())
            ratios[f"{name}_most_to_least"] = rows[-1]["p50_ms"] / rows[0]["p50_ms"]
    if "slots" in report:
        ratios["slots_most_to_least"] = report["slots"]["cpu_ratio"]
    if "steps" in report:
        ratios["eight_clients_to_one"] = report["steps"]["eight_clients_against_one"]
    return ratios


def _section(name: str) -> dict[str, Any]:
    if name == "scheduling":
        return passes()
    if name == "slots":
        return anyio.run(sections.slots)
    with bench_server(slots=32) as server:
        return _SERVED[name](server)
