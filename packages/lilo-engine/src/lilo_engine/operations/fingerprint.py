"""Fingerprint: what makes two requests the same request. Pure.

It is of the payload's meaning, not of its bytes on the wire: JSON, protobuf and compressed forms of one operation
have equal fingerprints. Mappings are sorted; a whole number is the same as int and as float.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NewType, TypeAlias, cast

from lilo_engine.errors import LiloError
from lilo_engine.operations.operation import CreateModel, Operation
from lilo_engine.operations.tensor import Tensor

Fingerprint = NewType("Fingerprint", bytes)
"""SHA-256 of the canonical form."""

_Update: TypeAlias = Callable[[bytes], None]


def fingerprint(operation: Operation | CreateModel) -> Fingerprint:
    """SHA-256 of the canonical form: kind, fields in order, every value with its length."""
    digest = hashlib.sha256()
    _feed(operation, digest.update)
    return Fingerprint(digest.digest())


def coalescing_key(loss: str, config: Mapping[str, float | str], *, forward_only: bool) -> bytes:
    """Equal for passes that may run in one command."""
    return _coalescing_key(loss, tuple(sorted(config.items())), forward_only)


@lru_cache(maxsize=1024)
def _coalescing_key(
    loss: str, config: tuple[tuple[str, float | str], ...], forward_only: bool
) -> bytes:
    # Clients send the same few again and again.
    digest = hashlib.sha256()
    _feed((loss, dict(config), forward_only), digest.update)
    return digest.digest()


def _feed(value: object, update: _Update) -> None:
    match value:
        case Tensor():
            update(f"T{value.dtype}{value.shape}{len(value.data)}:".encode())
            update(value.data)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            update(b"s%d:" % len(text))
            update(text)
        case None | bool():
            update(repr(value).encode())
        case int() | float():
            update(_number(value))
        case bytes():
            update(b"b%d:" % len(value))
            update(value)
        case _:
            _feed_container(value, update)


def _feed_container(value: object, update: _Update) -> None:
    if isinstance(value, tuple | list):
        items = cast("tuple[object, ...]", value)
        update(b"(%d:" % len(items))
        for item in items:
            _feed(item, update)
    elif isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value)
        update(b"{%d:" % len(pairs))
        for key in sorted(pairs):
            _feed(key, update)
            _feed(pairs[key], update)
    elif isinstance(value, LiloError):
        _feed((value.kind, value.message), update)
    else:
        assert dataclasses.is_dataclass(value), f"{type(value)} has no canonical form"
        update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            if field.compare:
                _feed(getattr(value, field.name), update)


def _number(value: float) -> bytes:
    """One form for a number whether JSON gave an int or protobuf a double."""
    try:
        as_float = float(value)
    except OverflowError:
        return b"n%d" % cast("int", value)
    return (
        b"n"
        + (repr(as_float) if as_float == value or as_float != as_float else str(value)).encode()
    )
