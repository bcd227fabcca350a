"""Codec: values of collectives as bytes, without running anything that the bytes ask for.

JSON, with what JSON lacks in tagged objects: bytes, tuples, mappings with any keys, frozen dataclasses, and errors of
lilo-volume. A dataclass or error is known if a module of lilo-volume defines it, or if it was given to `register`;
decoding never imports a module. Used by `tcp.py`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from lilo_volume.errors import VolumeError

_OURS = "lilo_volume."
_TAG = "!"
"""The only key of a tagged object; a plain mapping is tagged too, so that no data can look like a tag."""

_C = TypeVar("_C", bound=type)
_registered: dict[str, type] = {}


class Undecodable(ValueError):
    """Bytes that are no encoded value, or name a class that is not known here."""


def register(cls: _C) -> _C:
    """Let a frozen dataclass, or an error derived from `VolumeError`, cross; on every rank. Works as a decorator."""
    assert _is_known_sort(cls), f"{cls.__name__} is neither a frozen dataclass nor a VolumeError"
    _registered[_name(cls)] = cls
    return cls


def encode(value: object) -> bytes:
    """The bytes of `value`.

    Raises:
        TypeError: it holds something that cannot cross; the text says what.
    """
    return json.dumps(_packed(value), separators=(",", ":")).encode("ascii")


def decode(data: bytes | bytearray) -> Any:  # noqa: ANN401 - of whatever sort was encoded
    """The value of `data`.

    Raises:
        Undecodable: it is none.
    """
    try:
        return _unpacked(json.loads(data.decode("ascii")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Undecodable(f"not an encoded value: {error}") from error


def _packed(value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_packed(item) for item in cast("list[object]", value)]
    for tag, sort, pack in _PACKERS:
        if isinstance(value, sort):
            return {_TAG: [tag, pack(value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        _check_known(type(value))
        fields = {
            field.name: _packed(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return {_TAG: ["dataclass", [_name(type(value)), fields]]}
    raise TypeError(
        f"a {type(value).__name__} cannot cross to other ranks; send texts, numbers, bytes, tuples, lists, "
        "mappings, or a frozen dataclass that was registered"
    )


def _pack_error(error: VolumeError) -> object:
    _check_known(type(error))
    return [_name(type(error)), [_packed(arg) for arg in error.args]]


_PACKERS: tuple[tuple[str, type, Callable[[Any], object]], ...] = (
    ("bytes", bytes, lambda value: base64.b64encode(value).decode("ascii")),
    ("tuple", tuple, lambda value: [_packed(item) for item in value]),
    ("dict", Mapping, lambda value: [[_packed(k), _packed(v)] for k, v in value.items()]),
    ("error", VolumeError, _pack_error),
)


def _unpacked(value: object) -> object:
    if isinstance(value, list):
        return [_unpacked(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    tag, body = cast("dict[str, Any]", value)[_TAG]
    match tag:
        case "bytes":
            return base64.b64decode(body, validate=True)
        case "tuple":
            return tuple(_unpacked(item) for item in body)
        case "dict":
            return {_unpacked(key): _unpacked(item) for key, item in body}
        case "error":
            return _known(body[0], VolumeError)(*[_unpacked(arg) for arg in body[1]])
        case "dataclass":
            fields = {name: _unpacked(item) for name, item in body[1].items()}
            return _known(body[0], object)(**fields)
        case _:
            raise Undecodable(f"unknown tag {tag!r}")


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_known_sort(cls: type) -> bool:
    if issubclass(cls, VolumeError):
        return True
    parameters = cast("Any", getattr(cast("object", cls), "__dataclass_params__", None))
    return parameters is not None and bool(parameters.frozen)


def _check_known(cls: type) -> None:
    if _name(cls) not in _registered and not cls.__module__.startswith(_OURS):
        raise TypeError(
            f"{cls.__name__} cannot cross to other ranks; pass it to `register` on every rank first"
        )


def _known(name: str, base: type) -> Callable[..., object]:
    """The class of this name; only one that is loaded already, of our own modules or registered."""
    cls = _registered.get(name)
    if cls is None:
        module, _, path = name.partition(":")
        if module.startswith(_OURS) and module in sys.modules:
            cls = vars(sys.modules[module]).get(path)
    if not (isinstance(cls, type) and _name(cls) == name and issubclass(cls, base)):
        raise Undecodable(f"{name!r} is no class that may cross")
    if not _is_known_sort(cls):
        raise Undecodable(f"{name!r} is neither a frozen dataclass nor a VolumeError")
    return cls
