"""`lilo trace`: the timeline of a running server's lanes, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lilo_engine.cli.console_client import DEFAULT_URL, ApiKey, BaseUrl, ask
from lilo_engine.cli.problems import problems_in_one_line


def trace(
    out: Annotated[Path, typer.Argument(help="Written as JSON.")] = Path("lilo-trace.json"),
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Write the timeline of a server's lanes as a Chrome trace."""
    with problems_in_one_line():
        document = ask(base_url, "console/trace", api_key)
        out.write_text(json.dumps(document), "utf-8")
        spans = sum(event["ph"] == "X" for event in document["traceEvents"])
        print(f"{spans} commands written to {out}; open it in ui.perfetto.dev or chrome://tracing")
