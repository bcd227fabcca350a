"""`lilo keys create|list|revoke`: the API keys of a data folder, also while a server uses it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.config import DataFolder, default_data_dir
from lilo_engine.control.keys import Keys
from lilo_engine.control.records import Records

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="The server's data folder.", show_default=False)
]


app = typer.Typer(name="keys", help="API keys of a server.", no_args_is_help=True)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is.")] = "unnamed",
    data_dir: DataDir = None,
) -> None:
    """Make a key and print it; it cannot be shown again."""
    with problems_in_one_line():
        print(_keys(data_dir, make=True).create(name, time.time()))


@app.command("list")
def list_keys(data_dir: DataDir = None) -> None:
    """List the keys by id; the keys themselves are not kept."""
    with problems_in_one_line():
        for key in _keys(data_dir).listed():
            state = "valid" if key.revoked_s is None else f"revoked {_day(key.revoked_s)}"
            print(f"{key.key_id}  {_day(key.created_s)}  {state}  {key.name}")


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `lilo keys list` shows it.")],
    data_dir: DataDir = None,
) -> None:
    """End a key; a running server notices within seconds."""
    with problems_in_one_line():
        _keys(data_dir).revoke(key_id, time.time())


def _keys(data_dir: Path | None, *, make: bool = False) -> Keys:
    data = DataFolder(root=data_dir or default_data_dir())
    if not make and not data.root.is_dir():
        raise Problem(f"there is no data folder {data.root}; name the server's with --data-dir")
    data.create()
    return Keys(Records.at(data.root))


def _day(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")
