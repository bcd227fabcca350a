"""Errors of the definitions: a name that is not there, a definition that cannot hold, a source that cannot be read.

`DefinitionError` is a `ValueError`, so that a caller who knows nothing of this package still catches it as bad input.
"""

from __future__ import annotations


class DefinitionError(ValueError):
    """A definition was asked for or written wrongly; the message says what to do."""

    kind = "definition_error"


class UnknownDefinition(DefinitionError):
    """No definition of this name is installed; the message lists the nearest names."""

    kind = "unknown_definition"


class InvalidDefinition(DefinitionError):
    """Fields that do not fit each other, or a catalogue that cannot be loaded."""

    kind = "invalid_definition"


class InvalidSource(DefinitionError):
    """A model source that does not resolve to a folder with a model in it."""

    kind = "invalid_source"


class MissingModel(InvalidSource):
    """A model of the hub that was not downloaded to this machine; the message says how to."""

    kind = "missing_model"
