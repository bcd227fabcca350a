"""Publish checkpoints from many nodes as one, or not at all.

The guarantee: a reader gets the previous checkpoint or the new one, whole, whatever crashed and whenever. A
checkpoint exists when its manifest does, which is written last, after every rank reported what it wrote and the
committed state was seen to hold it. A checkpoint asked for by name is that one or an error, never another. What
cannot be verified is said, never passed.

The core needs nothing but the standard library. What `begin` does not need is imported when it is first
asked for.
"""

import importlib
from typing import TYPE_CHECKING

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
    NotFinished,
    OutcomeUnknown,
    PublishRefused,
    RankFailed,
    RankLost,
    StaleVersion,
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
from lilo_volume.volume import Entry, Volume
from lilo_volume.volumes.local import LocalVolume

if TYPE_CHECKING:
    from lilo_volume.asynchronous import AsyncPublisher, Pending
    from lilo_volume.bulletin import Bulletin
    from lilo_volume.exchange import Target, adopt, pull, push
    from lilo_volume.fit import Fit, can_load
    from lilo_volume.gc import Collected, collect_garbage, plan_garbage
    from lilo_volume.groups.tcp import TcpGroup, tcp_group
    from lilo_volume.holding import held_latest
    from lilo_volume.leases import Lease, lease
    from lilo_volume.pins import is_pinned, pin, unpin
    from lilo_volume.quarantines import quarantine, release
    from lilo_volume.restore import Latest, Skipped, latest, open_named, resume
    from lilo_volume.retention import Candidate, Decision, Retention
    from lilo_volume.transfer import Progress
    from lilo_volume.ttl import expiry, set_expiry
    from lilo_volume.verify import Verify
    from lilo_volume.volumes.fsspec import FsspecVolume
    from lilo_volume.volumes.modal import ModalVolume
    from lilo_volume.volumes.shared import SharedVolume

__all__ = [
    "AsyncPublisher",
    "Attempt",
    "Bulletin",
    "Candidate",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointMissing",
    "Collected",
    "Decision",
    "DigestingFile",
    "Entry",
    "FileEntry",
    "FileMissing",
    "Fit",
    "FsspecVolume",
    "Group",
    "GroupRefused",
    "GroupTimeout",
    "IdentityRefused",
    "InvalidPath",
    "Latest",
    "Lease",
    "Leftover",
    "LocalVolume",
    "LockTimeout",
    "Manifest",
    "ManifestInvalid",
    "MissingFiles",
    "ModalVolume",
    "NameTaken",
    "NotFinished",
    "OutcomeUnknown",
    "Pending",
    "Progress",
    "Publication",
    "PublishRefused",
    "RankFailed",
    "RankLost",
    "Receipt",
    "Retention",
    "SharedVolume",
    "Skipped",
    "SoloGroup",
    "StaleVersion",
    "Survey",
    "Target",
    "TcpGroup",
    "UnexpectedFiles",
    "Verify",
    "Volume",
    "VolumeBusy",
    "VolumeConflict",
    "VolumeError",
    "VolumeFull",
    "VolumeUnavailable",
    "adopt",
    "begin",
    "can_load",
    "catalogue",
    "collect_garbage",
    "decided_by_rank_zero",
    "done_by_every_rank",
    "expiry",
    "held_latest",
    "is_pinned",
    "latest",
    "lease",
    "open_named",
    "pin",
    "plan_garbage",
    "pull",
    "push",
    "quarantine",
    "release",
    "remove",
    "remove_named",
    "resume",
    "set_expiry",
    "survey",
    "tcp_group",
    "unpin",
]

_LATER = {
    "AsyncPublisher": "asynchronous",
    "Bulletin": "bulletin",
    "Candidate": "retention",
    "Collected": "gc",
    "Decision": "retention",
    "Fit": "fit",
    "FsspecVolume": "volumes.fsspec",
    "Latest": "restore",
    "Lease": "leases",
    "ModalVolume": "volumes.modal",
    "Pending": "asynchronous",
    "Progress": "transfer",
    "Retention": "retention",
    "SharedVolume": "volumes.shared",
    "Skipped": "restore",
    "Target": "exchange",
    "TcpGroup": "groups.tcp",
    "Verify": "verify",
    "adopt": "exchange",
    "can_load": "fit",
    "collect_garbage": "gc",
    "expiry": "ttl",
    "held_latest": "holding",
    "is_pinned": "pins",
    "latest": "restore",
    "lease": "leases",
    "open_named": "restore",
    "pin": "pins",
    "quarantine": "quarantines",
    "release": "quarantines",
    "plan_garbage": "gc",
    "pull": "exchange",
    "push": "exchange",
    "resume": "restore",
    "set_expiry": "ttl",
    "tcp_group": "groups.tcp",
    "unpin": "pins",
}
"""Names that are imported when they are first asked for, and the modules that have them. None may be called like a module:
importing that would put it in its place."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
