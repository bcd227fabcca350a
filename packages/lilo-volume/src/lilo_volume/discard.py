"""Discard: an attempt that was refused leaves nothing behind, neither in the committed state nor in any view.

The views come first: what stays in one would be committed again, with anything else that its node writes.
"""

from __future__ import annotations

import contextlib

from lilo_volume.errors import InvalidPath
from lilo_volume.files import remove_all, remove_tree
from lilo_volume.log import warn
from lilo_volume.manifest import RECORD_NAME, attempt_folder
from lilo_volume.node import NamedGroup, is_leader
from lilo_volume.publication import Publication
from lilo_volume.scan import remove_attempt
from lilo_volume.steps import Steps
from lilo_volume.volume import Volume


def discard(
    volume: Volume, group: NamedGroup, publication: Publication, steps: Steps, *, timeout_s: float
) -> None:
    """Remove an attempt that every rank knows to be refused; called by all of them. Never raises an error of ours.

    What cannot be removed is left to garbage collection: it carries the attempt's note, which goes last, and only
    once no view has anything else of the attempt.
    """
    leads = is_leader(group.nodes, group.rank)
    try:
        if leads:
            with steps.named("clear"):
                clear_view(volume, publication)
    except Exception as error:  # the other ranks wait for this one
        warn("%s was refused, and its view was not cleared: %s", attempt_folder(publication), error)
    try:
        group.barrier(timeout_s=timeout_s, step="clear")
        if leads:
            clear_view(volume, publication, note_too=True)
        if group.rank == 0:
            steps.retried("remove", lambda: remove_committed_attempt(volume, publication))
    except Exception as error:  # the refusal itself is what the caller must hear
        warn("%s was refused, and is left for later: %s", attempt_folder(publication), error)


def clear_view(volume: Volume, publication: Publication, *, note_too: bool = False) -> None:
    """Remove an attempt from this container's view; without its note, unless `note_too`."""
    with contextlib.suppress(InvalidPath, OSError):
        folder = volume.local_path(attempt_folder(publication))
        for place in folder.iterdir():
            if place.is_dir():
                with contextlib.suppress(OSError):
                    remove_all(place)
            elif place.name != RECORD_NAME:
                place.unlink(missing_ok=True)
        if note_too:
            remove_tree(folder)


def remove_committed_attempt(volume: Volume, publication: Publication) -> None:
    """Remove an attempt from the committed state; already gone: nothing."""
    remove_attempt(volume, attempt_folder(publication))
