"""Traces: whether this server tells an OpenTelemetry collector what it does, as the standard variables say."""

from __future__ import annotations

import importlib
import importlib.util
import logging

from lilo_engine.config import TRACES_VARIABLES, wants_traces
from lilo_engine.console.watcher import Unwatched, Watcher

_log = logging.getLogger(__name__)
_NEEDS = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def watcher() -> Watcher:
    """One that exports if a collector is named, else one that does nothing."""
    if not wants_traces():
        return Unwatched()
    if not all(map(_is_there, _NEEDS)):
        _log.warning(
            "%s names a collector, but nothing here can send traces; install lilo-engine[otel]",
            " or ".join(TRACES_VARIABLES),
        )
        return Unwatched()
    # Imported by name: the extra may be absent.
    return importlib.import_module("lilo_engine.console.otel").exporting()


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
