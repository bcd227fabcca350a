"""The commands that keep a volume in order: `gc`, `pin`, `unpin`, `quarantine`, `release`. They never remove the newest verified checkpoint."""

from __future__ import annotations

import argparse

from lilo_volume.cli.look import Subparsers
from lilo_volume.cli.output import GOOD, WRONG, say, say_json, say_table, size_text
from lilo_volume.cli.root import add_name, add_root, add_selection
from lilo_volume.gc import Collected, collect_garbage
from lilo_volume.pins import pin, unpin
from lilo_volume.quarantines import quarantine, release
from lilo_volume.retention import Decision, Retention
from lilo_volume.volume import Volume

_HOUR_S = 3600.0


def add_commands(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the commands of this file."""
    collect = commands.add_parser(
        "gc",
        help="remove what attempts left behind, and what the rules let go",
        description="Without a rule (--keep-...), every published checkpoint stays; what dead attempts and "
        "overwrites left behind goes once it is old enough. With rules, a checkpoint stays if any rule keeps it.",
    )
    add_root(collect, _gc)
    add_selection(collect)
    collect.add_argument("--dry-run", action="store_true", help="change nothing, only tell")
    collect.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    collect.add_argument(
        "--keep-every", type=int, metavar="K", help="keep those whose order is a multiple of K"
    )
    collect.add_argument("--keep-best", type=int, metavar="N", help="keep the best N by --metric")
    collect.add_argument(
        "--metric", metavar="KEY", help="key of the metadata that --keep-best is by"
    )
    collect.add_argument("--best", choices=("min", "max"), default="min", help="which end is best")
    collect.add_argument(
        "--reader-guard-s",
        type=float,
        default=900.0,
        metavar="S",
        help="younger checkpoints stay: a reader may just load them (default 900)",
    )
    collect.add_argument(
        "--attempt-guard-s",
        type=float,
        default=24 * _HOUR_S,
        metavar="S",
        help="younger unpublished attempts stay: they may still run (default 86400)",
    )
    collect.add_argument(
        "--remove-broken",
        action="store_true",
        help="remove published checkpoints that are not what their manifest says",
    )
    collect.add_argument(
        "--level",
        choices=("names", "size", "full"),
        default="size",
        help="what a checkpoint must pass to count as verified (default size)",
    )
    hold = commands.add_parser("pin", help="keep a checkpoint, whatever the rules say")
    add_root(hold, _pin)
    add_name(hold)
    hold.add_argument("--note", default="", help="why, for people")
    loose = commands.add_parser("unpin", help="let the rules decide about a checkpoint again")
    add_root(loose, _unpin)
    add_name(loose)
    bar = commands.add_parser(
        "quarantine", help="keep a checkpoint that was found bad, and let nobody load it"
    )
    add_root(bar, _quarantine)
    add_name(bar)
    bar.add_argument("--note", default="", help="why, for people")
    free = commands.add_parser("release", help="let a quarantined checkpoint be loaded again")
    add_root(free, _release)
    add_name(free)


def _gc(volume: Volume, arguments: argparse.Namespace) -> int:
    retention = Retention(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        keep_best=arguments.keep_best,
        metric=arguments.metric,
        best=arguments.best,
        reader_guard_s=arguments.reader_guard_s,
        attempt_guard_s=arguments.attempt_guard_s,
        remove_broken=arguments.remove_broken,
    )
    done = collect_garbage(
        volume,
        retention,
        collection=arguments.collection,
        kind=arguments.kind,
        level=arguments.level,
        dry_run=arguments.dry_run,
    )
    if arguments.json:
        say_json(
            {
                "dry_run": done.dry_run,
                "removed": [_describe(item) for item in done.removed],
                "kept": [_describe(item) for item in _kept(done)],
                "failures": [
                    {**_describe(failure.decision), "why": failure.why} for failure in done.failures
                ],
                "freed_bytes": done.freed_bytes,
                "stale_marks": done.stale_marks,
            }
        )
    else:
        _say_collected(done)
    return WRONG if done.failures else GOOD


def _kept(done: Collected) -> list[Decision]:
    going = {item.candidate.folder for item in done.removed}
    return [item for item in done.decisions if item.candidate.folder not in going]


def _say_collected(done: Collected) -> None:
    verb = "would remove" if done.dry_run else "removed"
    rows = [
        (verb, i.candidate.label, i.candidate.state, size_text(i.candidate.size_bytes), i.why)
        for i in done.removed
    ]
    rows += [
        ("failed", f.decision.candidate.label, f.decision.candidate.state, "-", f.why)
        for f in done.failures
    ]
    rows += [
        ("keep", i.candidate.label, i.candidate.state, size_text(i.candidate.size_bytes), i.why)
        for i in _kept(done)
    ]
    say_table(("", "CHECKPOINT", "STATE", "SIZE", "WHY"), rows)
    say(f"{verb} {len(done.removed)}, {size_text(done.freed_bytes)}")


def _describe(item: Decision) -> dict[str, object]:
    return {
        "label": item.candidate.label,
        "folder": item.candidate.folder,
        "state": item.candidate.state,
        "size_bytes": item.candidate.size_bytes,
        "verdict": item.verdict,
        "why": item.why,
    }


def _pin(volume: Volume, arguments: argparse.Namespace) -> int:
    pin(volume, arguments.collection, arguments.kind, arguments.name, note=arguments.note)
    return _say_kept(arguments, "pinned", now=True, changed=True)


def _unpin(volume: Volume, arguments: argparse.Namespace) -> int:
    changed = unpin(volume, arguments.collection, arguments.kind, arguments.name)
    return _say_kept(arguments, "pinned", now=False, changed=changed)


def _quarantine(volume: Volume, arguments: argparse.Namespace) -> int:
    where = (arguments.collection, arguments.kind, arguments.name)
    changed = quarantine(volume, *where, note=arguments.note)
    _say_kept(arguments, "quarantined", now=True, changed=changed)
    return GOOD


def _release(volume: Volume, arguments: argparse.Namespace) -> int:
    changed = release(volume, arguments.collection, arguments.kind, arguments.name)
    return _say_kept(arguments, "quarantined", now=False, changed=changed)


def _say_kept(arguments: argparse.Namespace, what: str, *, now: bool, changed: bool) -> int:
    """Say whether a checkpoint is pinned, or quarantined, `now`; nothing was to be undone: something is wrong."""
    label = f"{arguments.collection}/{arguments.kind}/{arguments.name}"
    if arguments.json:
        say_json({"label": label, what: now, "changed": changed})
    elif now:
        say(f"{label} is {what}")
    else:
        say(f"{label} {'is no longer' if changed else 'was not'} {what}")
    return GOOD if changed else WRONG
