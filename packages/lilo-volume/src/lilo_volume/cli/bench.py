"""The command `bench`: what publishing costs over plain writing, here and now."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from lilo_volume.bench.report import run
from lilo_volume.bench.settings import MIB, Settings
from lilo_volume.cli.look import Subparsers
from lilo_volume.cli.output import GOOD, say, say_json, say_table
from lilo_volume.errors import InvalidPath

_SIZE = re.compile(r"(\d+)\s*(MiB|GiB)", re.IGNORECASE)


def add_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "bench",
        help="what publishing costs over plain writing, here and now",
        description="Nodes are processes that write their shards to FOLDER, as a checkpoint and plainly, in turns.",
    )
    command.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="where to write; what is written is removed again (default: the system's temporary folder)",
    )
    command.add_argument("--size", default="2GiB", help="of one checkpoint (default 2GiB)")
    command.add_argument("--shards", type=int, default=16, help="files of it (default 16)")
    command.add_argument("--nodes", type=int, default=2, help="processes (default 2)")
    command.add_argument("--passes", type=int, default=5, help="beside a first one (default 5)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    command.set_defaults(alone=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder or tempfile.gettempdir())
    if not folder.is_dir():
        raise InvalidPath(f"{str(folder)!r} is no directory; expected one to write to")
    settings = Settings(
        folder=str(folder.absolute()),
        size_bytes=_bytes(arguments.size),
        shards=arguments.shards,
        nodes=arguments.nodes,
        passes=arguments.passes,
    )
    figures = run(settings, quiet=arguments.json)
    if arguments.json:
        say_json(figures)
    else:
        _say(figures)
    return GOOD


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidPath(f"--size {text!r}: expected a number and MiB or GiB, as 256MiB")
    return int(match[1]) * MIB * (1024 if match[2].lower() == "gib" else 1)


def _say(figures: dict[str, Any]) -> None:
    rows = [
        (
            way,
            f"{seconds['p50']:.3f} s",
            f"{figures['gib_per_second_p50'][way]:.2f} GiB/s",
            f"{figures['publish_over_write'][way]['p50']:.3f}"
            if way in figures["publish_over_write"]
            else "",
            f"{figures['extra_cpu_seconds_per_gib'][way]:.3f} s"
            if way in figures["extra_cpu_seconds_per_gib"]
            else "",
        )
        for way, seconds in figures["seconds"].items()
    ]
    say_table(("WAY", "P50", "RATE", "OVER PLAIN", "CPU PER GIB"), rows)
    for way, rates in figures["verify_full"].items():
        say(
            f"verify in full ({way}): {rates['verify_gib_per_second']:.2f} GiB/s, "
            f"{rates['verify_over_digest']:.0%} of the digest's own rate"
        )
