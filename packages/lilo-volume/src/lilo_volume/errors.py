"""Errors of lilo-volume: grouped by what the caller should do, with a stable kind, picklable.

    VolumeError
    +-- InvalidPath          user    a path that would leave the volume, or cannot be one
    +-- VolumeBusy           server  the medium refuses while files are open
    +-- VolumeUnavailable    server  the medium did not answer; the call may still have been applied
    +-- VolumeConflict       server  somebody else changed the same thing at the same time
    +-- VolumeFull           server  no room, or a quota is reached
    +-- FileMissing          user    no such file in the committed state
    +-- LockTimeout          server  another publisher of the same name holds on for too long
    +-- GroupTimeout         server  a rank did not come to a collective in time
    |   +-- RankLost         server  it names the step, and the ranks and nodes that are gone or did not come
    +-- GroupRefused         user    the ranks do not make up one group: a token, a size or a rank is wrong
    +-- NotFinished          server  a save in the background did not end in time
    +-- PublishRefused       server  nothing was published; what was there before still is
    |   +-- StaleVersion     user    a version of a bulletin that is not newer than the newest
    |   +-- NameTaken        user    the name exists, and overwriting was not asked for
    |   +-- IdentityRefused  user    two nodes or ranks claim to be one, or a rank has no volume or another one
    |   +-- MissingFiles     server  fewer files than expected arrived
    |   +-- UnexpectedFiles  server  files arrived that nobody expected, or twice
    |   +-- RankFailed       server  one rank could not do its part
    +-- OutcomeUnknown       server  the manifest was sent and the medium will not say whether it arrived
    +-- ManifestInvalid      server  a manifest that cannot be believed, with the reason
    +-- CheckpointMissing    user    no checkpoint of this name, or none at all
    +-- CheckpointCorrupt    server  published, but its files are not what the manifest says

Every error keeps what it was built from in `args`, so that it crosses processes unchanged.
"""

from __future__ import annotations

from typing import ClassVar, Literal


class VolumeError(Exception):
    """Anything that lilo-volume raises on purpose."""

    kind: ClassVar[str] = "volume_error"
    """Stable and append-only: callers may act on it."""
    category: ClassVar[Literal["user", "server"]] = "server"


class InvalidPath(VolumeError, ValueError):
    """A path that would leave the volume, or that cannot be one."""

    kind = "invalid_path"
    category = "user"


class VolumeBusy(VolumeError):
    """The medium refuses while files are open; close them and try again."""

    kind = "volume_busy"


class VolumeUnavailable(VolumeError):
    """The medium did not answer; the call may still have been applied."""

    kind = "volume_unavailable"


class VolumeConflict(VolumeError):
    """Somebody else changed the same thing at the same time; look, then try again."""

    kind = "volume_conflict"


class VolumeFull(VolumeError):
    """No room, or a quota is reached."""

    kind = "volume_full"


class FileMissing(VolumeError):
    """There is no such file in the committed state."""

    kind = "file_missing"
    category = "user"


class LockTimeout(VolumeError):
    """Another publisher of the same name did not finish in time."""

    kind = "lock_timeout"


class GroupTimeout(VolumeError):
    """A rank did not come to a collective in time; the message names the step and who is missing."""

    kind = "group_timeout"


class RankLost(GroupTimeout):
    """Ranks are gone, or did not come in time; every rank that still runs gets this error."""

    kind = "rank_lost"

    def __init__(self, step: str, ranks: tuple[int, ...], nodes: tuple[str, ...], why: str) -> None:
        """Keep the parts; the text is made of them. `nodes` has the node of each of `ranks`, "" if not known."""
        super().__init__(step, ranks, nodes, why)
        self.step = step
        self.ranks = ranks
        self.nodes = nodes

    def __str__(self) -> str:
        step, ranks, nodes, why = self.args
        who = ", ".join(
            f"rank {rank} on node {node or 'unknown'}"
            for rank, node in zip(ranks[:4], nodes[:4], strict=True)
        )
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"step {step!r}: {who}{more}: {why}"


class GroupRefused(VolumeError):
    """The ranks do not make up one group; the text has the table of who came, and what is wrong with it."""

    kind = "group_refused"
    category = "user"


class NotFinished(VolumeError):
    """A save in the background did not end in time; it may still do so."""

    kind = "not_finished"


class PublishRefused(VolumeError):
    """Nothing was published; what was there before still is."""

    kind = "publish_refused"


class StaleVersion(PublishRefused):
    """A version of a bulletin that is not newer than what was announced already; a bulletin never goes back."""

    kind = "stale_version"
    category = "user"


class NameTaken(PublishRefused):
    """A checkpoint of this name is published, and overwriting was not asked for."""

    kind = "name_taken"
    category = "user"


class IdentityRefused(PublishRefused):
    """The ranks' identities cannot be right: `table` shows what each of them said."""

    kind = "identity_refused"
    category = "user"

    def __init__(self, checkpoint: str, why: str, table: str) -> None:
        """Keep the parts; the text is made of them."""
        super().__init__(checkpoint, why, table)
        self.table = table

    def __str__(self) -> str:
        checkpoint, why, table = self.args
        return f"checkpoint {checkpoint!r}: {why}; nothing was written. The ranks said:\n{table}"


class MissingFiles(PublishRefused):
    """Fewer files than expected arrived; `missing` has their names, sorted, `sources` who should have sent them."""

    kind = "missing_files"

    def __init__(
        self,
        checkpoint: str,
        missing: tuple[str, ...],
        num_expected: int,
        sources: tuple[str, ...] = (),
    ) -> None:
        """Keep the parts; the text is made of them. `sources`: as "rank 2 on node X", where that is known."""
        super().__init__(checkpoint, missing, num_expected, sources)
        self.missing = missing
        self.sources = sources

    def __str__(self) -> str:
        checkpoint, missing, num_expected, sources = self.args
        whence = f", expected from {', '.join(sources[:4])}" if sources else ""
        return (
            f"checkpoint {checkpoint!r} is short of {len(missing)} of {num_expected} files (first missing: "
            f"{', '.join(missing[:3])}{whence}); nothing was published; save again under the same name"
        )


class UnexpectedFiles(PublishRefused):
    """Files arrived that nobody expected, or that two ranks wrote; `unexpected` has their names."""

    kind = "unexpected_files"

    def __init__(self, checkpoint: str, unexpected: tuple[str, ...], why: str) -> None:
        """Keep the parts; the text is made of them."""
        super().__init__(checkpoint, unexpected, why)
        self.unexpected = unexpected

    def __str__(self) -> str:
        checkpoint, unexpected, why = self.args
        return (
            f"checkpoint {checkpoint!r} has {len(unexpected)} files that {why} (first: "
            f"{', '.join(unexpected[:3])}); nothing was published"
        )


class RankFailed(PublishRefused):
    """One rank could not do its part; `rank` and `node` say which, the text says why."""

    kind = "rank_failed"

    def __init__(self, checkpoint: str, rank: int, node: str, cause: str) -> None:
        """Keep the parts; the text is made of them."""
        super().__init__(checkpoint, rank, node, cause)
        self.rank = rank
        self.node = node

    def __str__(self) -> str:
        checkpoint, rank, node, cause = self.args
        return f"checkpoint {checkpoint!r}: rank {rank} on node {node} failed: {cause}; nothing was published"


class OutcomeUnknown(VolumeError):
    """The manifest was sent and the medium will not say whether it arrived; look before saving again."""

    kind = "outcome_unknown"


class ManifestInvalid(VolumeError, ValueError):
    """A manifest that cannot be believed; the text is the reason."""

    kind = "manifest_invalid"


class CheckpointMissing(VolumeError, LookupError):
    """There is no published checkpoint of this name, or none at all."""

    kind = "checkpoint_missing"
    category = "user"

    def __str__(self) -> str:
        # LookupError would show the repr of the text.
        return " ".join(str(arg) for arg in self.args)


class CheckpointCorrupt(VolumeError):
    """Published, but its files are not what the manifest says; the text names the first fault."""

    kind = "checkpoint_corrupt"
