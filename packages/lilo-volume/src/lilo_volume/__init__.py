"""Publish checkpoints from many nodes as one, or not at all.

The guarantee: a reader gets the previous checkpoint or the new one, whole, whatever crashed and whenever. A
checkpoint exists when its manifest does, which is written last, after every rank reported what it wrote and the
committed state was seen to hold it. A checkpoint asked for by name is that one or an error, never another. What
cannot be verified is said, never passed.

The core needs nothing but the standard library.
"""

from lilo_volume.agreement import decided_by_rank_zero, done_by_every_rank
from lilo_volume.attempt import Attempt, begin
from lilo_volume.catalogue import Leftover, Survey, catalogue, remove, remove_named, survey
from lilo_volume.checkpoint import Checkpoint
from lilo_volume.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    FileMissing,
    GroupRefused,
    GroupTimeout,
    IdentityRefused,
    InvalidPath,
    LockTimeout,
    ManifestInvalid,
    MissingFiles,
    NameTaken,
    OutcomeUnknown,
    PublishRefused,
    RankFailed,
    RankLost,
    UnexpectedFiles,
    VolumeBusy,
    VolumeConflict,
    VolumeError,
    VolumeFull,
    VolumeUnavailable,
)
from lilo_volume.files import DigestingFile
from lilo_volume.group import Group, SoloGroup
from lilo_volume.manifest import FileEntry, Manifest, Receipt
from lilo_volume.publication import Publication
from lilo_volume.restore import Latest, Skipped, latest, open_named
from lilo_volume.verify import Verify
from lilo_volume.volume import Entry, Volume
from lilo_volume.volumes.local import LocalVolume

__all__ = [
    "Attempt",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointMissing",
    "DigestingFile",
    "Entry",
    "FileEntry",
    "FileMissing",
    "Group",
    "GroupRefused",
    "GroupTimeout",
    "IdentityRefused",
    "InvalidPath",
    "Latest",
    "Leftover",
    "LocalVolume",
    "LockTimeout",
    "Manifest",
    "ManifestInvalid",
    "MissingFiles",
    "NameTaken",
    "OutcomeUnknown",
    "Publication",
    "PublishRefused",
    "RankFailed",
    "RankLost",
    "Receipt",
    "Skipped",
    "SoloGroup",
    "Survey",
    "UnexpectedFiles",
    "Verify",
    "Volume",
    "VolumeBusy",
    "VolumeConflict",
    "VolumeError",
    "VolumeFull",
    "VolumeUnavailable",
    "begin",
    "catalogue",
    "decided_by_rank_zero",
    "done_by_every_rank",
    "latest",
    "open_named",
    "remove",
    "remove_named",
    "survey",
]
