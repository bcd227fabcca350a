"""ROOT as people type it, as a volume: a folder, `modal://NAME`, or a url that fsspec reaches. Nothing is created.

Other places than folders are read and written through a temporary folder, which is removed when the command ends.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

from lilo_volume.errors import InvalidPath
from lilo_volume.volume import Volume
from lilo_volume.volumes.fsspec import FsspecVolume
from lilo_volume.volumes.local import LocalVolume
from lilo_volume.volumes.modal import unmounted
from lilo_volume.volumes.shared import SharedVolume

MODAL = "modal://"


@contextlib.contextmanager
def opened(root: str, *, shared: bool = False) -> Generator[Volume]:
    """The volume at `root`, which exists.

    Raises:
        InvalidPath: it is no folder, or a setting does not go with this kind of root.
        VolumeUnavailable: what this kind of root needs is not installed.
    """
    if "://" not in root:
        if not Path(root).is_dir():
            raise InvalidPath(f"{root!r} is no directory; expected the root of a volume")
        yield SharedVolume(root) if shared else LocalVolume(root)
        return
    if shared:
        raise InvalidPath(f"--shared is for a folder that several hosts mount, not for {root!r}")
    with tempfile.TemporaryDirectory(prefix="lilo-volume-") as staging:
        if root.startswith(MODAL):
            yield unmounted(root.removeprefix(MODAL), staging)
        else:
            yield FsspecVolume(root, staging)


def add_root(
    parser: argparse.ArgumentParser, run: Callable[..., int], *, optional: bool = False
) -> None:
    """What every command that works on a volume takes; `run` gets the volume and the arguments."""
    help_text = "directory of the volume, modal://NAME, or a url as s3://..."
    if optional:
        parser.add_argument("root", metavar="ROOT", nargs="?", help=help_text)
    else:
        parser.add_argument("root", metavar="ROOT", help=help_text)
    parser.add_argument(
        "--shared", action="store_true", help="ROOT is a directory that several hosts mount"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Which part of the volume is meant."""
    parser.add_argument("--collection", help="only this one")
    parser.add_argument("--kind", help="only this kind of the collection")
    parser.set_defaults(selects=True)


def add_name(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint is meant."""
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument("kind", metavar="KIND")
    parser.add_argument("name", metavar="NAME")
