"""What the Modal client raises, as lilo-volume's errors. The cause is kept.

The client maps the server's status to a type, and then `commit` and `reload` wrap two of those in a plain
RuntimeError; only its text still tells an open file from a conflict.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Generator

from lilo_volume.errors import (
    FileMissing,
    VolumeBusy,
    VolumeConflict,
    VolumeError,
    VolumeFull,
    VolumeUnavailable,
)


@contextlib.contextmanager
def translating(what: str) -> Generator[None]:
    """Raise the client's errors as ours; `what` was asked for.

    Raises:
        VolumeBusy, FileMissing, VolumeConflict, VolumeFull, VolumeUnavailable: with the client's error as cause.
    """
    try:
        yield
    except VolumeError:
        raise
    except Exception as error:
        raise classified(what, error) from error


def classified(what: str, error: Exception) -> VolumeError:
    """Which of our errors an error of the client is; pure."""
    known = importlib.import_module("modal.exception")
    text = f"{what}: {str(error) or type(error).__name__}"
    if isinstance(error, RuntimeError):
        return _of_text(text)
    # ConflictError is an InvalidError: the order matters.
    if isinstance(error, known.ConflictError):
        return _of_text(text)
    if isinstance(error, known.NotFoundError | FileNotFoundError):
        return FileMissing(text)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or isinstance(error, known.ResourceExhaustedError):
        return VolumeFull(text)
    return VolumeUnavailable(f"{text} ({type(error).__name__})")


def _of_text(text: str) -> VolumeError:
    if "open files" in text:
        return VolumeBusy(text)
    if "not found" in text.lower():
        return FileMissing(text)
    return VolumeConflict(text)
