"""Discovery: trainers by name, from the entry-point group `lilo.backends`. Nothing else imports a trainer."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import cast

from lilo_engine.commands.backend import BackendFactory
from lilo_engine.errors import NotFound

GROUP = "lilo.backends"


def backend_names() -> tuple[str, ...]:
    """The trainers that are installed."""
    return tuple(sorted(entry_points(group=GROUP).names))


def find_backend(name: str) -> BackendFactory:
    """The factory of a trainer.

    Raises:
        NotFound: no installed package offers it; lists those there are.
    """
    for point in entry_points(group=GROUP, name=name):
        return cast("BackendFactory", point.load())
    there = ", ".join(backend_names()) or "none"
    raise NotFound(
        f"no installed package offers the backend {name!r}; there are: {there}; "
        "the trainer is in the package lilo-miles-backend"
    )
