"""Parse the command line, open the volume, run one command, turn errors into exit codes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from lilo_volume.cli import bench, doctor, keep, look, move
from lilo_volume.cli.output import USAGE, WRONG, complain
from lilo_volume.cli.root import opened
from lilo_volume.errors import InvalidPath, VolumeError

INTERRUPTED = 130
TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Without `argv`: those of this process, which is the command's alone."""
    if argv is None:
        # So that temporary folders and processes of a long command go when it is ended, as they do at Ctrl-C.
        signal.signal(signal.SIGTERM, _end)
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (VolumeError, OSError) as error:
        complain(str(error))
        return USAGE if isinstance(error, InvalidPath) else WRONG
    except ValueError as error:  # a setting that makes no sense
        complain(str(error))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lilo-volume",
        description="Look at published checkpoints, keep them in order, move them.",
        epilog="Exit codes: 0 good, 1 found something wrong or nothing, 2 bad usage.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (look, keep, move, doctor, bench):
        part.add_commands(commands)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if "alone" in arguments:
        return int(arguments.alone(arguments))
    if "selects" in arguments and arguments.kind is not None and arguments.collection is None:
        raise InvalidPath("--kind needs --collection; name the collection too")
    if arguments.root is None:
        return int(arguments.run(None, arguments))
    with opened(arguments.root, shared=arguments.shared) as volume:
        return int(arguments.run(volume, arguments))


if __name__ == "__main__":
    sys.exit(main())
