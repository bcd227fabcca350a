"""The commands that move checkpoints: `pull`, `push`, `adopt`. Every byte is digested on its way."""

from __future__ import annotations

import argparse
from pathlib import Path

from lilo_volume.checkpoint import Checkpoint
from lilo_volume.cli.look import Subparsers
from lilo_volume.cli.output import GOOD, Bar, describe, say, say_json, size_text
from lilo_volume.cli.root import add_name, add_root
from lilo_volume.errors import CheckpointCorrupt, CheckpointMissing, InvalidPath
from lilo_volume.exchange import Target, adopt, pull, push
from lilo_volume.manifest import name_folder
from lilo_volume.scan import newest, scan
from lilo_volume.volume import Volume


def add_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the commands of this file."""
    out = commands.add_parser("pull", help="copy a checkpoint into a plain folder, checked")
    add_root(out, _pull)
    add_name(out)
    out.add_argument(
        "destination", metavar="FOLDER", help="empty, or of a pull that was broken off"
    )
    into = commands.add_parser("push", help="publish a plain folder as a checkpoint")
    add_root(into, _push)
    into.add_argument("folder", metavar="FOLDER")
    taken = commands.add_parser(
        "adopt", help="publish a folder that is on the volume but was not made by lilo-volume"
    )
    add_root(taken, _adopt)
    taken.add_argument("folder", metavar="FOLDER", help="relative to ROOT; it is copied, and stays")
    for command in (into, taken):
        command.add_argument("--collection", help="default: what the folder's manifest says")
        command.add_argument("--kind", help="default: what the folder's manifest says")
        command.add_argument("--name", help="default: what the folder's manifest says")
        command.add_argument("--order", type=int, help="default: what the folder's manifest says")
        command.add_argument(
            "--metadata", action="append", metavar="KEY=TEXT", help="kept in the manifest"
        )
        command.add_argument(
            "--overwrite", action="store_true", help="replace a checkpoint of this name"
        )
    for command in (out, into, taken):
        command.add_argument(
            "--workers", type=int, metavar="N", help="threads that move bytes (default: up to 4)"
        )


def _pull(volume: Volume, arguments: argparse.Namespace) -> int:
    checkpoint = _named(volume, arguments.collection, arguments.kind, arguments.name)
    with Bar("pull", shown=not arguments.json) as bar:
        folder = pull(
            volume,
            checkpoint,
            Path(arguments.destination),
            workers=arguments.workers,
            tell=bar.tell,
        )
    if arguments.json:
        say_json({**describe(checkpoint), "folder": str(folder)})
    else:
        say(f"{checkpoint.label}: {size_text(checkpoint.size_bytes)} in {folder}, all verified")
    return GOOD


def _named(volume: Volume, collection: str, kind: str, name: str) -> Checkpoint:
    """The checkpoint of a name, from its manifest; its files are neither checked nor fetched."""
    found = scan(volume, name_folder(collection, kind, name))
    label = f"{collection}/{kind}/{name}"
    for item in found:
        if item.fault is not None:
            raise CheckpointCorrupt(f"checkpoint {label!r} ({item.folder}): {item.fault}")
    current = newest(found)
    if current is None or current.manifest is None:
        raise CheckpointMissing(f"no checkpoint {label!r}; `lilo-volume ls` lists those there are")
    return Checkpoint.of(volume, current.manifest)


def _push(volume: Volume, arguments: argparse.Namespace) -> int:
    with Bar("push", shown=not arguments.json) as bar:
        published = push(
            volume,
            Path(arguments.folder),
            _target(arguments),
            workers=arguments.workers,
            tell=bar.tell,
        )
    return _say_published(published, arguments)


def _adopt(volume: Volume, arguments: argparse.Namespace) -> int:
    with Bar("adopt", shown=not arguments.json) as bar:
        published = adopt(
            volume,
            arguments.folder,
            _target(arguments),
            workers=arguments.workers,
            tell=bar.tell,
        )
    return _say_published(published, arguments)


def _target(arguments: argparse.Namespace) -> Target:
    given: list[str] | None = arguments.metadata
    metadata = None
    if given is not None:
        if wrong := [text for text in given if "=" not in text]:
            raise InvalidPath(f"--metadata {wrong[0]!r}: expected KEY=TEXT")
        metadata = dict(text.split("=", 1) for text in given)
    return Target(
        collection=arguments.collection,
        kind=arguments.kind,
        name=arguments.name,
        order=arguments.order,
        metadata=metadata,
        overwrite=arguments.overwrite,
    )


def _say_published(checkpoint: Checkpoint, arguments: argparse.Namespace) -> int:
    if arguments.json:
        say_json(describe(checkpoint))
    else:
        say(f"{checkpoint.label}: {size_text(checkpoint.size_bytes)} published")
    return GOOD
