"""CheckpointRef: which published checkpoint is meant. The only file that takes `tinker://` apart.

Grammar: `tinker://{run}/{weights|sampler_weights|external_weights}/{name}`; the run id has colons, no part has a slash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from lilo_engine.errors import InvalidRequest

CheckpointKind: TypeAlias = Literal["weights", "sampler_weights", "external_weights"]
"""`weights` can be trained on (adapter and optimizer); the others are PEFT folders, to sample from here or to
download."""

_KINDS = get_args(CheckpointKind)
_SCHEME = "tinker://"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """The address of one published checkpoint."""

    run_id: str
    """The id of the model that was saved."""
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        """The `tinker://` form."""
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @staticmethod
    def start_of(run_id: str) -> str:
        """What the `tinker://` forms of a run's checkpoints begin with."""
        return f"{_SCHEME}{run_id}/"

    @classmethod
    def parse(cls, path: str) -> CheckpointRef:
        """Read the `tinker://` form.

        Raises:
            InvalidRequest: it is not such a path; the message shows the grammar.
        """
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3 or not all(parts):
            raise InvalidRequest(
                f"{path!r} is not a checkpoint path; expected tinker://RUN/KIND/NAME "
                f"with KIND one of {', '.join(_KINDS)}"
            )
        return cls.of(*parts)

    @classmethod
    def of(cls, run_id: str, kind: str, name: str) -> CheckpointRef:
        """Check the parts, as they stand in a path or in a URL, and put them together.

        Raises:
            InvalidRequest: the kind does not exist, or the name cannot be one.
        """
        if kind not in _KINDS:
            raise InvalidRequest(
                f"{kind!r} is not a kind of checkpoint; there are {', '.join(_KINDS)}"
            )
        return cls(run_id=run_id, kind=cast(CheckpointKind, kind), name=check_name(name))


def check_name(name: str) -> str:
    """Return `name` if it can be one path component of a checkpoint.

    Raises:
        InvalidRequest: it is empty, longer than 128, or holds a slash, a control character or a dot name.
    """
    bad = not name or len(name) > 128 or name in (".", "..") or name.strip() != name
    if bad or any(c in "/\\" or ord(c) < 32 or ord(c) == 127 for c in name):
        raise InvalidRequest(
            f"{name!r} cannot be a checkpoint name; use 1 to 128 characters without slashes, "
            "control characters or outer blanks, and not '.' or '..'"
        )
    return name
