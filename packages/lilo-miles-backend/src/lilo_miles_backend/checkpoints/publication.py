"""Publication: one attempt for one destination, and what the engine is told when it is published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from lilo_engine.commands.command import Destination, Published
from lilo_engine.errors import CommandFailed, LiloError
from lilo_volume import Attempt, Checkpoint, Group, Volume, VolumeError, begin

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.checkpoints.metadata import describe
from lilo_miles_backend.checkpoints.outcome import PeerFailed
from lilo_miles_backend.checkpoints.translate import volume_errors

ONE_RANK: Mapping[str, int] = {"tp": 1, "cp": 1, "dp": 1}
"""Layout of a trainer of one rank."""

TIMEOUT_S = 1800.0
"""For ranks to come together for a checkpoint: as long as the slowest may take to write to slow storage. It has nothing
to do with the limit of training's collectives, which must not wait for storage."""


def publish(
    volume: Volume,
    group: Group,
    state: AdapterState,
    destination: Destination,
    *,
    layout: Mapping[str, int],
    write: Callable[[Attempt], Collection[str] | None],
    node: str | None = None,
) -> Published:
    """Publish what `write` puts into an attempt; it returns the files that the checkpoint must have.

    `node` says whose view of the volume this rank has; None: the environment tells (`lilo_volume.begin`).

    Raises:
        InvalidRequest: the name is taken.
        CommandFailed: it could not be written or published; nothing of it is visible.
    """
    with volume_errors():
        attempt = begin(
            volume,
            group,
            collection=destination.run_id,
            kind=destination.kind,
            name=destination.name,
            order=destination.order,
            overwrite=destination.overwrite,
            timeout_s=TIMEOUT_S,
            node=node,
        )
        with attempt:
            expected = _written(write, attempt)
            checkpoint = attempt.publish(
                expected=expected, layout=layout, metadata=describe(state, destination.metadata)
            )
    return published(checkpoint, destination)


def _written(
    write: Callable[[Attempt], Collection[str] | None], attempt: Attempt
) -> Collection[str] | None:
    """What `write` returns; whatever it fails with is the end of this attempt, and of nothing else."""
    try:
        return write(attempt)
    except (LiloError, VolumeError, OSError, PeerFailed):
        raise
    except Exception as error:
        raise CommandFailed(
            f"checkpoint {attempt.label!r} could not be written: {type(error).__name__}: {error}; nothing was published"
        ) from error


def published(checkpoint: Checkpoint, destination: Destination) -> Published:
    """The engine's view of a checkpoint."""
    return Published(
        run_id=destination.run_id,
        kind=destination.kind,
        name=destination.name,
        attempt=checkpoint.publication.attempt,
        folder=str(checkpoint.folder),
        size_bytes=checkpoint.size_bytes,
        digest=checkpoint.manifest.digest,
    )
