"""`lilo keys create|list|revoke`: the API keys of a data folder, also while a server uses it."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import typer

from lilo_engine.cli.problems import Problem, problems_in_one_line
from lilo_engine.cli.sizes import parse_size, show_size
from lilo_engine.config import DataFolder, default_data_dir
from lilo_engine.console.usage_meter import Used
from lilo_engine.control.access import KeyLimits
from lilo_engine.control.keys import Key, Keys
from lilo_engine.control.records import Records
from lilo_engine.control.usage import UsageLog

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="The server's data folder.", show_default=False)
]

app = typer.Typer(name="keys", help="API keys of a server.", no_args_is_help=True)


@app.command("create")
def create(
    who: Annotated[str, typer.Argument(metavar="[NAME]", help="Whose key it is.")] = "unnamed",
    name: Annotated[
        str | None, typer.Option(help="The same, as an option.", show_default=False)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second that it may begin; polls and heartbeats are free.",
            min=0.001,
            show_default=False,
        ),
    ] = None,
    max_body: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Largest body of a request, as 64MiB.",
            show_default=False,
        ),
    ] = None,
    max_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Its bodies that are being read, its operations and its samples that wait: so much of each at most.",
            show_default=False,
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            help="Id or owner of a key whose sessions and checkpoints it sees too, to replace that key.",
            show_default=False,
        ),
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="May watch what all keys do: console and metrics.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Make a key and print it; it cannot be shown again. It sees what it makes, and nothing of other keys."""
    limits = KeyLimits(rate_per_s=rate, max_body_bytes=max_body, max_waiting_bytes=max_memory)
    with problems_in_one_line():
        keys = Keys(_records(data_dir, make=True))
        made = keys.create(name or who, time.time(), owner=owner, operator=operator, limits=limits)
        print(made)


@app.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    since: Annotated[
        str, typer.Option(help="Count usage from this day on, as 2026-11-30.", show_default=False)
    ] = "",
    data_dir: DataDir = None,
) -> None:
    """List the keys by id, with their limits and what their owners used; the keys themselves are not kept."""
    with problems_in_one_line():
        if since and not _is_day(since):
            raise Problem(f"--since is {since!r}; expected a day, as 2026-11-30")
        records = _records(data_dir)
        used = UsageLog(records).by_owner(since)
        keys = Keys(records).listed()
        if as_json:
            print(json.dumps([_as_json(key, used) for key in keys], indent=2))
            return
        for key in keys:
            state = "valid" if key.revoked_s is None else f"revoked {_day(key.revoked_s)}"
            words = [key.key_id, _day(key.created_s), state, key.name, *_notes(key)]
            if key.owner in used:
                words.append(_usage(used[key.owner]))
            print("  ".join(words))
        for owner in sorted(set(used) - {key.owner for key in keys}):
            print(f"{owner or 'everybody'}  no key  {_usage(used[owner])}")


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `lilo keys list` shows it.")],
    data_dir: DataDir = None,
) -> None:
    """End a key; a running server notices within seconds. What it made stays; see `create --owner`."""
    with problems_in_one_line():
        Keys(_records(data_dir)).revoke(key_id, time.time())


def _records(data_dir: Path | None, *, make: bool = False) -> Records:
    data = DataFolder(root=data_dir or default_data_dir())
    if not make and not data.root.is_dir():
        raise Problem(f"there is no data folder {data.root}; name the server's with --data-dir")
    data.create()
    return Records.at(data.root)


def _notes(key: Key) -> list[str]:
    """What is not as usual about a key."""
    limits = key.limits
    return [
        *(["operator"] if key.operator else []),
        *([f"owner {key.owner}"] if key.owner != key.key_id else []),
        *([f"rate {limits.rate_per_s:g}/s"] if limits.rate_per_s is not None else []),
        *([f"body {show_size(limits.max_body_bytes)}"] if limits.max_body_bytes else []),
        *([f"memory {show_size(limits.max_waiting_bytes)}"] if limits.max_waiting_bytes else []),
    ]


def _usage(used: Used) -> str:
    return (
        f"used {used.trained_tokens} trained, {used.prompt_tokens} prompt, {used.sampled_tokens} sampled tokens, "
        f"{used.device_s:.1f} device seconds"
    )


def _as_json(key: Key, used: dict[str, Used]) -> dict[str, object]:
    return {
        **dataclasses.asdict(key),
        "used": dataclasses.asdict(used.get(key.owner, Used())),
    }


def _is_day(text: str) -> bool:
    """Whether days of the records can be compared with it, letter by letter."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _day(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")
