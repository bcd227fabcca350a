"""Errors of the engine: grouped by what the reader should do, with a stable kind, picklable.

    LiloError
    +-- UserError                the request is wrong; sending it again cannot help
    |   +-- InvalidRequest       400  bad field, bad value, bad path, reused number
    |   +-- Unauthorized         401  no key or a wrong one
    |   +-- NotFound             404  no such model, checkpoint, session, future
    |   +-- Gone                 410  it was there, and ended; the message says the way back
    |   +-- TooLarge             413  body over the limit
    |   +-- UnsupportedMedia     415  content type or encoding
    +-- ServerError              ours, the trainer's, or the line's between us
        +-- TooSlow              408  the body did not come in time; trying again helps
        +-- Saturated            429  a limit is reached for now
        |   +-- RateLimited      429  one key's; it says when to try again
        +-- Unavailable          503  starting, draining; trying again helps
        +-- CommandFailed        500  the trainer refused or failed one command; it still runs
        +-- BackendLost          500  the trainer is gone; its models must be created again

`requests/error_response.py` is the only place that turns one into HTTP.
"""

from __future__ import annotations

from typing import ClassVar, Literal


class LiloError(Exception):
    """An error with words for the user: what was wrong, what was expected, what to do."""

    kind: ClassVar[str] = "error"
    """Stable and append-only: callers may act on it."""
    category: ClassVar[Literal["user", "server"]] = "server"

    @property
    def message(self) -> str:
        """The text a user sees."""
        return str(self)

    def __eq__(self, other: object) -> bool:
        """Errors are values: they travel inside operations and futures."""
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        """Consistent with equality."""
        return hash((type(self), str(self)))


class UserError(LiloError):
    """The request is wrong; sending it again cannot help."""

    kind = "user_error"
    category = "user"


class InvalidRequest(UserError):
    """A field, a value, a path or a number that cannot be accepted."""

    kind = "invalid_request"


class Unauthorized(UserError):
    """No API key, or one that this server does not know."""

    kind = "unauthorized"


class NotFound(UserError):
    """No such model, checkpoint, session or future."""

    kind = "not_found"


class Gone(UserError):
    """It existed and ended; the message says how to go on."""

    kind = "gone"


class TooLarge(UserError):
    """A body over the limit."""

    kind = "too_large"


class UnsupportedMedia(UserError):
    """A content type or content encoding that is not spoken here."""

    kind = "unsupported_media"


class ServerError(LiloError):
    """Ours, or the trainer's."""

    kind = "server_error"


class TooSlow(ServerError):
    """The body of a request did not come in time; nothing was begun, so that sending it again can help."""

    kind = "too_slow"


class Saturated(ServerError):
    """A limit is reached for now; trying again later can help."""

    kind = "saturated"


class RateLimited(Saturated):
    """A key has begun too many requests; it may go on after `retry_after_s`."""

    kind = "rate_limited"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """The message without the number."""
        return str(self.args[0])


class Unavailable(ServerError):
    """Starting or draining; trying again later can help."""

    kind = "unavailable"


class CommandFailed(ServerError):
    """The trainer failed one command; it still runs and others go on."""

    kind = "command_failed"


class BackendLost(ServerError):
    """The trainer is gone, and with it the state of its models."""

    kind = "backend_lost"
