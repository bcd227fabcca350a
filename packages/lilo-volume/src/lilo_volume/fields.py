"""Fields: a JSON object taken apart one checked field at a time. Used by `manifest.py` and `record.py` only."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from lilo_volume.errors import ManifestInvalid

_MAX_INTEGER = 2**63 - 1


def reject_constant(text: str) -> NoReturn:
    """For `json.loads`: no NaN, no infinity, no fractions."""
    raise ValueError(f"{text} is no integer")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object with each key once."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("an object has the same key twice")
    return out


class Fields:
    """What is left of one object; `end` refuses what nobody asked for."""

    def __init__(self, left: dict[str, Any], where: str) -> None:
        """Take `left` apart; `where` it was found is for messages."""
        self.left = left
        self.where = where

    @classmethod
    def of(cls, value: object, where: str) -> Fields:
        """Start with `value`.

        Raises:
            ManifestInvalid: it is no object.
        """
        if not isinstance(value, dict):
            raise ManifestInvalid(f"{where}: is {type(value).__name__}, expected an object")
        return cls(dict(cast("dict[str, Any]", value)), where)

    def _take(self, name: str, kind: type) -> Any:  # noqa: ANN401 - narrowed by every caller
        if name not in self.left:
            raise ManifestInvalid(f"{self.where}: {name} is not there")
        value = self.left.pop(name)
        if type(value) is not kind:  # bool is no int here
            raise ManifestInvalid(
                f"{self.where}: {name} is {type(value).__name__}, expected {kind.__name__}"
            )
        return value

    def text(self, name: str) -> str:
        """A string."""
        return self._take(name, str)

    def integer(self, name: str, *, least: int | None = 0) -> int:
        """An integer of at most 63 bits; `least` None allows negative ones."""
        value = self._take(name, int)
        low = -_MAX_INTEGER if least is None else least
        if not low <= value <= _MAX_INTEGER:
            raise ManifestInvalid(f"{self.where}: {name} is out of range, expected at least {low}")
        return value

    def record(self, name: str) -> Fields:
        """An object."""
        return Fields.of(self._take(name, dict), f"{self.where}.{name}")

    def records(self, name: str) -> list[Fields]:
        """A list of objects."""
        items: list[object] = self._take(name, list)
        return [Fields.of(item, f"{self.where}.{name}[{i}]") for i, item in enumerate(items)]

    def text_list(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        items: list[object] = self._take(name, list)
        if any(type(item) is not str for item in items):
            raise ManifestInvalid(f"{self.where}: {name} holds something else than strings")
        return tuple(cast("list[str]", items))

    def texts(self, name: str) -> dict[str, str]:
        """An object of strings."""
        part = self.record(name)
        return {key: part.text(key) for key in list(part.left)}

    def integers(self, name: str) -> dict[str, int]:
        """An object of integers, none negative."""
        part = self.record(name)
        return {key: part.integer(key) for key in list(part.left)}

    def end(self) -> None:
        """Refuse what was not taken."""
        if self.left:
            raise ManifestInvalid(
                f"{self.where}: unknown fields {', '.join(sorted(self.left)[:5])}"
            )
