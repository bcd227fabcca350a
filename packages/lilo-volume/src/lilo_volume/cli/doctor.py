"""The command `doctor`: what is installed, who this node is, and what is wrong with a volume. It changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_volume.catalogue import Survey, survey
from lilo_volume.cli.look import Subparsers
from lilo_volume.cli.output import GOOD, WRONG, say_json, say_table, size_text
from lilo_volume.cli.root import add_root
from lilo_volume.config import node_id
from lilo_volume.digest import best_algorithm, new_hasher
from lilo_volume.errors import VolumeError
from lilo_volume.restore import newest_good
from lilo_volume.volume import Volume
from lilo_volume.volumes.local import LocalVolume

State: TypeAlias = Literal["good", "note", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    """`note`: works, and could be better, or will once something is cleared up."""
    text: str


def add_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "doctor",
        help="what is installed, and what is wrong with a volume; without ROOT only the first",
    )
    add_root(command, _doctor, optional=True)


def _doctor(volume: Volume | None, arguments: argparse.Namespace) -> int:
    findings = installation()
    if volume is not None:
        findings += medium(volume, arguments.root)
        try:
            findings += content(volume, survey(volume))
        except VolumeError as error:
            findings.append(Finding(what="listing", state="wrong", text=str(error)))
    if arguments.json:
        say_json(
            {"findings": [{"what": f.what, "state": f.state, "text": f.text} for f in findings]}
        )
    else:
        say_table(("", "WHAT", ""), [(f.state, f.what, f.text) for f in findings])
    return WRONG if any(found.state == "wrong" for found in findings) else GOOD


def installation() -> list[Finding]:
    """This machine, whatever the volume."""
    version = importlib.metadata.version("lilo-volume")
    python = ".".join(map(str, sys.version_info[:3]))
    fast = best_algorithm() != "sha256"
    findings = [
        Finding(what="lilo-volume", state="good", text=f"{version}, Python {python}"),
        Finding(what="node", state="good", text=node_id()),
        Finding(
            what="digest",
            state="good" if fast else "note",
            text=best_algorithm()
            if fast
            else "sha256; install lilo-volume[fast] for one that costs a tenth",
        ),
    ]
    for extra, module in (("modal", "modal"), ("fsspec", "fsspec"), ("torch", "torch")):
        there = importlib.util.find_spec(module) is not None
        text = "installed" if there else f"not installed: lilo-volume[{extra}]"
        findings.append(Finding(what=f"extra {extra}", state="good", text=text))
    return findings


def medium(volume: Volume, root: str) -> list[Finding]:
    """Where the volume lies."""
    kind = type(volume).__name__
    findings = [Finding(what="volume", state="good", text=f"{kind} at {root}")]
    if isinstance(volume, LocalVolume):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(volume.root)
            tight = usage.free < usage.total // 20
            text = f"{size_text(usage.free)} of {size_text(usage.total)} free"
            findings.append(Finding(what="room", state="note" if tight else "good", text=text))
    else:
        findings.append(
            Finding(what="room", state="good", text="not told by this medium; it says so when full")
        )
    return findings


def content(volume: Volume, found: Survey) -> list[Finding]:
    """What is on the volume."""
    total = sum(item.size_bytes for item in found.checkpoints)
    count = f"{len(found.checkpoints)}, {size_text(total)}"
    algorithms = {entry.algorithm for item in found.checkpoints for entry in item.manifest.files}
    return [
        Finding(what="checkpoints", state="good", text=count),
        *_leftovers(found),
        *(
            Finding(
                what="unverifiable",
                state="wrong",
                text=f"checkpoints with {algorithm}, which is not installed: lilo-volume[fast]",
            )
            for algorithm in sorted(algorithms)
            if new_hasher(algorithm) is None
        ),
        *_newest_that_fail(volume, found),
    ]


def _leftovers(found: Survey) -> list[Finding]:
    counts = Counter(left.state for left in found.leftovers)
    sizes: Counter[str] = Counter()
    for left in found.leftovers:
        sizes[left.state] += left.size_bytes
    return [
        Finding(
            what=f"{state} folders",
            state="wrong" if state == "broken" else "note",
            text=f"{count}, {size_text(sizes[state])}; {_ADVICE[state]}",
        )
        for state, count in sorted(counts.items())
    ]


def _newest_that_fail(volume: Volume, found: Survey) -> list[Finding]:
    """Collections and kinds whose latest is not the newest that was published."""
    unpublished = {left.folder for left in found.leftovers if left.state == "unpublished"}
    findings: list[Finding] = []
    series = {(i.publication.collection, i.publication.kind) for i in found.checkpoints}
    for collection, kind in sorted(series):
        manifest, skipped = newest_good(volume, collection, kind, "size")
        published = [skip for skip in skipped if skip.folder not in unpublished]
        if manifest is None or published:
            why = published[0].why if published else "none is good"
            findings.append(Finding(what=f"latest of {collection}/{kind}", state="wrong", text=why))
    return findings


_ADVICE = {
    "broken": "`verify` says why; `gc --remove-broken` removes them",
    "unpublished": "attempts that run or died; `gc` removes the dead ones",
    "replaced": "overwritten; `gc` removes them",
    "foreign": "not made by lilo-volume, and left alone; `adopt` can publish them",
}
