"""Translate: errors of lilo-volume as the errors that a backend may raise."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from lilo_engine.errors import CommandFailed, InvalidRequest, NotFound
from lilo_volume import CheckpointMissing, GroupTimeout, NameTaken, VolumeError

from lilo_miles_backend.checkpoints.outcome import PeerFailed


@contextlib.contextmanager
def volume_errors() -> Generator[None]:
    """Raise the engine's errors in place of the volume's.

    Raises:
        InvalidRequest: the name is taken.
        NotFound: there is no such checkpoint.
        PeerFailed: a rank did not come; nothing can be done together any more.
        CommandFailed: anything else; the trainer itself is well.
    """
    try:
        yield
    except NameTaken as error:
        raise InvalidRequest(str(error)) from error
    except CheckpointMissing as error:
        raise NotFound(str(error)) from error
    except GroupTimeout as error:
        raise PeerFailed(f"ranks did not come together for a checkpoint: {error}") from error
    except VolumeError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"reading or writing the checkpoint failed: {error}") from error
