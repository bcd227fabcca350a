"""The `lilo-volume` command: look at a volume from a shell.

Exit codes: 0 good, 1 found something wrong (or nothing), 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lilo_volume.catalogue import Leftover, survey
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.errors import VolumeError
from lilo_volume.restore import Skipped, latest
from lilo_volume.scan import newest, scan
from lilo_volume.verify import find_fault
from lilo_volume.volumes.local import LocalVolume

GOOD, WRONG, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    root = Path(arguments.root)
    if not root.is_dir():
        sys.stderr.write(
            f"lilo-volume: {str(root)!r} is no directory; expected the root of a volume\n"
        )
        return USAGE
    if getattr(arguments, "kind", None) is not None and arguments.collection is None:
        sys.stderr.write("lilo-volume: --kind needs --collection; name the collection too\n")
        return USAGE
    try:
        return int(arguments.run(LocalVolume(root), arguments))
    except VolumeError as error:
        sys.stderr.write(f"lilo-volume: {error}\n")
        return WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lilo-volume", description="Look at published checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("ls", help="list checkpoints and what attempts left behind")
    listing.set_defaults(run=_ls)
    last = commands.add_parser(
        "latest", help="the newest good checkpoint of each collection and kind"
    )
    last.set_defaults(run=_latest)
    check = commands.add_parser("verify", help="compare every checkpoint with its manifest")
    check.set_defaults(run=_verify)
    for command in (listing, last, check):
        command.add_argument("root", metavar="ROOT", help="directory of the volume")
        command.add_argument("--collection", help="only this one")
        command.add_argument("--kind", help="only this kind of the collection")
        command.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    for command in (last, check):
        command.add_argument(
            "--level",
            choices=("names", "size", "full"),
            default="full",
            help="names: files are there; size: and as long; full: and of their digest (default)",
        )
    return parser


def _ls(volume: LocalVolume, arguments: argparse.Namespace) -> int:
    found = survey(volume, collection=arguments.collection, kind=arguments.kind)
    if arguments.json:
        _print_json(
            checkpoints=[_describe(item) for item in found.checkpoints],
            leftovers=[_describe_leftover(item) for item in found.leftovers],
        )
    else:
        for item in found.checkpoints:
            _print(f"{_when(item)}  {item.size_bytes:>12,} B  {item.label}")
        for left in found.leftovers:
            _print(f"{left.state:>24}  {left.size_bytes:>12,} B  {left.label}: {left.why}")
    return WRONG if any(left.state == "broken" for left in found.leftovers) else GOOD


def _latest(volume: LocalVolume, arguments: argparse.Namespace) -> int:
    everything = survey(volume, collection=arguments.collection, kind=arguments.kind)
    groups = {
        (item.publication.collection, item.publication.kind) for item in everything.checkpoints
    }
    answers = {key: latest(volume, *key, verify=arguments.level) for key in sorted(groups)}
    good = [item.checkpoint for item in answers.values() if item.checkpoint is not None]
    skipped = [skip for item in answers.values() for skip in item.skipped]
    # Where everything is broken there is no group to ask.
    said = {skip.folder for skip in skipped}
    skipped += [
        Skipped(label=left.label, folder=left.folder, why=left.why)
        for left in everything.leftovers
        if left.state == "broken" and left.folder not in said
    ]
    if arguments.json:
        _print_json(
            latest=[_describe(item) for item in good],
            skipped=[{"label": s.label, "folder": s.folder, "why": s.why} for s in skipped],
        )
    else:
        for item in good:
            _print(f"{_when(item)}  {item.label}  {item.folder}")
        for skip in skipped:
            _print(f"skipped {skip.label} ({skip.folder}): {skip.why}")
    complete = len(good) == len(answers) and len(skipped) == len(said)
    return GOOD if good and complete else WRONG


def _verify(volume: LocalVolume, arguments: argparse.Namespace) -> int:
    everything = survey(volume, collection=arguments.collection, kind=arguments.kind)
    faults = {left.label: left.why for left in everything.leftovers if left.state == "broken"}
    for item in everything.checkpoints:
        found = newest(scan(volume, item.folder.parent.relative_to(volume.root).as_posix()))
        fault = "it was removed" if found is None else find_fault(volume, found, arguments.level)
        if fault is not None:
            faults[item.label] = fault
    labels = sorted({item.label for item in everything.checkpoints} | faults.keys())
    if arguments.json:
        _print_json(
            level=arguments.level,
            checkpoints=[{"label": name, "fault": faults.get(name)} for name in labels],
        )
    else:
        for name in labels:
            _print(
                f"{'wrong' if name in faults else 'good':>5}  {name}  {faults.get(name, '')}".rstrip()
            )
    return WRONG if faults else GOOD


def _describe(item: Checkpoint) -> dict[str, Any]:
    where = item.publication
    return {
        "collection": where.collection,
        "kind": where.kind,
        "name": where.name,
        "order": where.order,
        "attempt": where.attempt,
        "folder": str(item.folder),
        "size_bytes": item.size_bytes,
        "num_files": len(item.manifest.files),
        "world_size": item.manifest.world_size,
        "created_unix_ms": item.manifest.created_unix_ms,
        "metadata": dict(item.manifest.metadata),
        "digest": item.manifest.digest,
    }


def _describe_leftover(left: Leftover) -> dict[str, Any]:
    return {
        "label": left.label,
        "folder": left.folder,
        "state": left.state,
        "size_bytes": left.size_bytes,
        "why": left.why,
    }


def _when(item: Checkpoint) -> str:
    moment = datetime.fromtimestamp(item.manifest.created_unix_ms / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _print_json(**parts: object) -> None:
    _print(json.dumps(parts, sort_keys=True))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
