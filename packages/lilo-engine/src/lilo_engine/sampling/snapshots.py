"""Snapshots: published adapters in this machine's view of the checkpoint volume, before an engine reads their folder.

What was published from here is in the view. What another machine published since the view was brought up to date, or
what was copied by the volume's server, is not; nor is anything of an object store after its folder here was lost.
"""

from __future__ import annotations

from pathlib import Path

from lilo_volume import CheckpointMissing, VolumeError, open_named
from lilo_volume.manifest import MANIFEST_NAME

from lilo_engine.errors import NotFound, Unavailable
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.storage import open_checkpoints


class Snapshots:
    """Sees to it that adapters can be read; called from a thread."""

    def __init__(self, root: Path) -> None:
        """Of the checkpoints below `root`."""
        self._root = root

    def see(self, version: AdapterVersion) -> str:
        """The folder of a snapshot in this view, brought there if need be.

        What the records say may be a folder of a view that there was before this machine, or this data folder, had
        another place.

        Raises:
            NotFound: it is published no more.
            Unavailable: the view cannot be brought up to date; trying again can help.
        """
        if Path(version.folder, MANIFEST_NAME).is_file():  # the last file that a view gets
            return version.folder
        path, _, attempt = version.name.rpartition("@")
        ref = CheckpointRef.parse(path)
        try:
            checkpoint = open_named(
                open_checkpoints(self._root), ref.run_id, ref.kind, ref.name, verify="names"
            )
        except CheckpointMissing as error:
            raise NotFound(f"the snapshot {ref} is gone: {error}") from error
        except VolumeError as error:
            raise Unavailable(
                f"the snapshot {ref} could not be brought to this machine: {error}"
            ) from error
        if checkpoint.publication.attempt != attempt:
            raise NotFound(f"the snapshot {ref} was replaced by a later save; sample from that")
        return str(checkpoint.folder)
