"""The commands that look: `ls`, `latest`, `verify`. They change nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from lilo_volume.catalogue import Survey, survey
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.cli.output import (
    GOOD,
    WRONG,
    Bar,
    describe,
    describe_leftover,
    say,
    say_json,
    say_table,
    size_text,
    time_text,
)
from lilo_volume.cli.root import add_root, add_selection
from lilo_volume.manifest import attempt_folder
from lilo_volume.marks import marks_of
from lilo_volume.naming import encode
from lilo_volume.restore import Skipped, newest_good
from lilo_volume.scan import newest, scan
from lilo_volume.transfer import Progress, Tell
from lilo_volume.verify import Verify, find_fault
from lilo_volume.volume import Volume

Subparsers = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage] - argparse has no public name for it


def add_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the commands of this file."""
    listing = commands.add_parser("ls", help="list checkpoints and what attempts left behind")
    add_root(listing, _ls)
    last = commands.add_parser(
        "latest", help="the newest good checkpoint of each collection and kind"
    )
    add_root(last, _latest)
    check = commands.add_parser("verify", help="compare every checkpoint with its manifest")
    add_root(check, _verify)
    for command in (listing, last, check):
        add_selection(command)
    for command in (last, check):
        command.add_argument(
            "--level",
            choices=("names", "size", "full"),
            default="full",
            help="names: files are there; size: and as long; full: and of their digest (default)",
        )
    check.add_argument(
        "--share",
        type=_share,
        default=1.0,
        metavar="X",
        help="of the files, how many the level full reads, drawn anew each time, in (0, 1] (default 1)",
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def _survey(volume: Volume, arguments: argparse.Namespace) -> Survey:
    return survey(volume, collection=arguments.collection, kind=arguments.kind)


def _ls(volume: Volume, arguments: argparse.Namespace) -> int:
    found = _survey(volume, arguments)
    marks = marks_of(volume.list_committed(""))
    pinned = {mark.home for mark in marks if mark.kind == "pin"}
    barred = {f"{mark.home}/{encode(mark.attempt)}" for mark in marks if mark.kind == "quarantine"}
    if arguments.json:
        say_json(
            {
                "checkpoints": [
                    {
                        **describe(item),
                        "pinned": _home(item) in pinned,
                        "quarantined": attempt_folder(item.publication) in barred,
                    }
                    for item in found.checkpoints
                ],
                "leftovers": [describe_leftover(item) for item in found.leftovers],
            }
        )
    else:
        rows = [
            (
                item.label,
                str(item.publication.order),
                time_text(item.manifest.created_unix_ms),
                size_text(item.size_bytes),
                str(len(item.manifest.files)),
                _kept(
                    pinned=_home(item) in pinned,
                    quarantined=attempt_folder(item.publication) in barred,
                ),
            )
            for item in found.checkpoints
        ]
        say_table(("CHECKPOINT", "ORDER", "PUBLISHED", "SIZE", "FILES", ""), rows)
        if found.leftovers:
            say("")
        left = [(i.label, i.state, size_text(i.size_bytes), i.why) for i in found.leftovers]
        say_table(("LEFTOVER", "STATE", "SIZE", "WHY"), left)
    return WRONG if any(left.state == "broken" for left in found.leftovers) else GOOD


def _kept(*, pinned: bool, quarantined: bool) -> str:
    """The last column of `ls`."""
    return ", ".join(
        word for word, held in (("pinned", pinned), ("quarantined", quarantined)) if held
    )


def _home(item: Checkpoint) -> str:
    return attempt_folder(item.publication).rpartition("/")[0]


def _latest(volume: Volume, arguments: argparse.Namespace) -> int:
    everything = _survey(volume, arguments)
    groups = {
        (item.publication.collection, item.publication.kind) for item in everything.checkpoints
    }
    answers = {key: newest_good(volume, *key, arguments.level) for key in sorted(groups)}
    good = [Checkpoint.of(volume, found) for found, _ in answers.values() if found is not None]
    skipped = [skip for _, passed_over in answers.values() for skip in passed_over]
    # Where everything is broken there is no group to ask.
    said = {skip.folder for skip in skipped}
    skipped += [
        Skipped(label=left.label, folder=left.folder, why=left.why)
        for left in everything.leftovers
        if left.state == "broken" and left.folder not in said
    ]
    if arguments.json:
        say_json(
            {
                "latest": [describe(item) for item in good],
                "skipped": [{"label": s.label, "folder": s.folder, "why": s.why} for s in skipped],
            }
        )
    else:
        rows = [
            (
                item.label,
                str(item.publication.order),
                time_text(item.manifest.created_unix_ms),
                str(item.folder),
            )
            for item in good
        ]
        say_table(("LATEST", "ORDER", "PUBLISHED", "FOLDER"), rows)
        if skipped:
            say("")
        say_table(("SKIPPED", "FOLDER", "WHY"), [(s.label, s.folder, s.why) for s in skipped])
    complete = len(good) == len(answers) and len(skipped) == len(said)
    return GOOD if good and complete else WRONG


def _verify(volume: Volume, arguments: argparse.Namespace) -> int:
    everything = _survey(volume, arguments)
    faults = {left.label: left.why for left in everything.leftovers if left.state == "broken"}
    sizes = {item.label: item.size_bytes for item in everything.checkpoints}
    with Bar("verify", shown=not arguments.json) as bar:
        tells = _one_after_another(everything.checkpoints, bar)
        for item, tell in zip(everything.checkpoints, tells, strict=True):
            fault = _fault_of(volume, item, arguments.level, arguments.share, tell)
            if fault is not None:
                faults[item.label] = fault
    labels = sorted(sizes.keys() | faults.keys())
    if arguments.json:
        checkpoints = [{"label": name, "fault": faults.get(name)} for name in labels]
        say_json({"level": arguments.level, "checkpoints": checkpoints})
    else:
        rows = [
            (
                "wrong" if name in faults else "good",
                name,
                size_text(sizes[name]) if name in sizes else "-",
                faults.get(name, ""),
            )
            for name in labels
        ]
        say_table(("", "CHECKPOINT", "SIZE", "FAULT"), rows)
    return WRONG if faults else GOOD


def _fault_of(
    volume: Volume, item: Checkpoint, level: Verify, share: float, tell: Tell
) -> str | None:
    found = newest(scan(volume, _home(item)))
    if found is None:
        return "it was removed"
    return find_fault(volume, found, level, share=share, tell=tell)


def _one_after_another(items: Sequence[Checkpoint], bar: Bar) -> Iterator[Tell]:
    """What each checkpoint tells, as a part of the whole."""
    total_bytes = sum(item.size_bytes for item in items)
    total_files = sum(len(item.manifest.files) for item in items)
    done_bytes = done_files = 0

    def tell(progress: Progress) -> None:
        bar.tell(
            Progress(
                done_bytes=done_bytes + progress.done_bytes,
                total_bytes=total_bytes,
                done_files=done_files + progress.done_files,
                total_files=total_files,
            )
        )

    for item in items:
        yield tell
        done_bytes += item.size_bytes
        done_files += len(item.manifest.files)
