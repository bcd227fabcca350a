"""Place: where a server keeps its things, as typed at the command line, made or found, with whoever else uses it kept out."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager
from pathlib import Path

import sqlalchemy as sa
from filelock import FileLock, Timeout
from sqlalchemy.exc import ArgumentError

from lilo_engine.cli.problems import Problem
from lilo_engine.config import RECORDS_URL_VARIABLE, DataFolder, default_data_dir


def data_folder(data_dir: Path | None, checkpoints: Path | None = None) -> DataFolder:
    """The folder as typed, else the default; made if missing.

    Raises:
        Problem: it cannot be used.
    """
    data = DataFolder(root=data_dir or default_data_dir(), checkpoints_at=checkpoints)
    try:
        data.create()
    except OSError as error:
        raise Problem(
            f"the data folder {data.root} cannot be used: {error.strerror or error}; "
            "choose another with --data-dir"
        ) from error
    return data


def locked(data: DataFolder) -> AbstractContextManager[object]:
    """The lock of the folder, held until the context ends.

    Raises:
        Problem: another server holds it.
    """
    try:
        return FileLock(data.lock).acquire(timeout=0)
    except Timeout as error:
        raise Problem(
            f"another server uses the data folder {data.root}; stop it, or choose another with --data-dir"
        ) from error


def records_url_without_password(url: str | None) -> str | None:
    """A `--records` that may be in a list of processes.

    Raises:
        Problem: it has a password.
    """
    try:
        has_password = url is not None and sa.make_url(url).password is not None
    except ArgumentError:
        has_password = False
    if has_password:
        raise Problem(
            "--records has a password, which the list of processes would show; give the URL in "
            f"{RECORDS_URL_VARIABLE}, or the password in ~/.pgpass"
        )
    return url


def this_server(what: str) -> str:
    """This process in words, by which another one is told of it."""
    return f"{what} (pid {os.getpid()} on {platform.node()})"
