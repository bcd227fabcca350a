"""Frames: one value as bytes, for the seams between processes. No pickle, no sockets: who sends them is the bridge.

    "LILO" | u32 length of the head | head: JSON | the raw buffers, one after another

The head holds the structure and the numbers; every `bytes` in the value is a buffer that is neither escaped nor
looked at, so that a frame costs one copy per side. A frame can only name registered frozen dataclasses and the
errors of `lilo_engine.errors`; nothing in it is ever executed.

Head grammar: None, bool, int, float and str are themselves; a JSON object is a mapping; a JSON list starts with
its tag: `["t", ...]` tuple, `["l", ...]` list, `["b", i]` buffer i, `["d", name, ...]` dataclass with its fields in
order, `["e", kind, message]` error.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any, cast

from lilo_engine import errors
from lilo_engine.commands import command
from lilo_engine.errors import LiloError
from lilo_engine.operations import datum, operation, reference, result, tensor

MAX_FRAME_BYTES = 2**31
"""Larger frames are refused on both sides: a length beyond it means the stream is out of step."""

_MAGIC = b"LILO"
_START = struct.Struct("<4sI")

_LEAVES = frozenset((type(None), bool, int, float, str))
_NESTED = frozenset((list, dict))

_MANY = 1024
"""Buffers; with more of them the head is made in pieces."""
_PIECE = 64
"""Items of a list that are made in one piece."""

_classes: dict[str, type[Any]] = {}
_fields: dict[type[Any], tuple[str, tuple[str, ...]]] = {}
_errors: dict[str, type[LiloError]] = {}


class FrameError(ValueError):
    """Bytes that are no frame, or a value that cannot be in one. On a connection it is a transport error."""


def register(*classes: type[Any]) -> None:
    """Allow frozen dataclasses in frames, under their class names.

    Registering the same class again does nothing. Both processes must register the same ones.

    Raises:
        FrameError: another class has that name, or it is no frozen dataclass.
    """
    for cls in classes:
        params = getattr(cls, "__dataclass_params__", None)
        if params is None or not params.frozen:
            raise FrameError(f"{cls.__name__} is not a frozen dataclass; only those travel")
        if _classes.setdefault(cls.__name__, cls) is not cls:
            raise FrameError(f"two classes are called {cls.__name__}; rename one")
        _fields[cls] = (cls.__name__, _fields_of(cls))


def _fields_of(cls: type[Any]) -> tuple[str, ...]:
    """Those that it is made of; what it works out by itself does not travel."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def encode(value: object) -> bytes:
    """The frame of a value.

    Args:
        value: registered dataclasses, errors, tuples, lists, mappings with text keys, None, bool, int, float, str
            and bytes, nested as wanted.

    Raises:
        FrameError: something in it cannot travel, or it is over `MAX_FRAME_BYTES`.
    """
    buffers: list[bytes] = []
    structure = _pack(value, buffers)
    parts = [structure, [len(buffer) for buffer in buffers]]
    head = (_json(parts) if len(buffers) < _MANY else _json_in_pieces(parts)).encode()
    size = _START.size + len(head) + sum(map(len, buffers))
    _check_size(size)
    return b"".join([_START.pack(_MAGIC, len(head)), head, *buffers])


def decode(frame: bytes | bytearray | memoryview) -> Any:  # noqa: ANN401 - the caller knows what it asked for
    """The value of a frame; its buffers are copied out, so that the frame can go.

    Raises:
        FrameError: it is no whole frame, or names an unknown class.
    """
    view = memoryview(frame)
    _check_size(len(view))
    if len(view) < _START.size:
        raise FrameError(f"a frame has at least {_START.size} bytes, got {len(view)}")
    magic, head_bytes = _START.unpack_from(view)
    if magic != _MAGIC:
        raise FrameError(f"a frame starts with {_MAGIC!r}, got {bytes(magic)!r}")
    end = _START.size + head_bytes
    try:
        structure, lengths = json.loads(bytes(view[_START.size : end]))
        return _unpack(structure, _cut(view, end, lengths))
    except FrameError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise FrameError(
            f"the head of a frame of {len(view)} bytes cannot be read: {error}"
        ) from error


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _json_in_pieces(value: object) -> str:
    """The same text; but no call of it keeps other threads from running for as long as all of a large head takes."""
    if type(value) is not list:
        return _json(value)
    items = cast("list[object]", value)
    if len(items) <= _PIECE:
        return f"[{','.join(map(_json_in_pieces, items))}]"
    pieces = (_json(items[at : at + _PIECE])[1:-1] for at in range(0, len(items), _PIECE))
    return f"[{','.join(pieces)}]"


def _check_size(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")


def _cut(view: memoryview, start: int, lengths: list[int]) -> list[bytes]:
    if len(view) - start != sum(lengths):
        raise FrameError(
            f"the buffers have {len(view) - start} bytes, the head says {sum(lengths)}"
        )
    buffers: list[bytes] = []
    for length in lengths:
        buffers.append(bytes(view[start : start + length]))
        start += length
    return buffers


def _pack(value: object, buffers: list[bytes]) -> object:
    """JSON form of a value; its buffers are appended to `buffers`. Exact types first: a batch has thousands."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is bytes:
        buffers.append(cast("bytes", value))
        return ["b", len(buffers) - 1]
    known = _fields.get(kind)
    if known is not None:
        name, names = known
        return ["d", name, *[_pack(getattr(value, field), buffers) for field in names]]
    return _pack_container(value, buffers)


def _pack_container(value: object, buffers: list[bytes]) -> object:
    if isinstance(value, tuple | list):
        tag = "t" if isinstance(value, tuple) else "l"
        return [tag, *[_pack(item, buffers) for item in cast("tuple[object, ...]", value)]]
    if isinstance(value, Mapping):
        packed: dict[str, object] = {}
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                raise FrameError(f"a mapping in a frame has text keys, got {key!r}")
            packed[key] = _pack(item, buffers)
        return packed
    if isinstance(value, LiloError):
        return ["e", value.kind, value.message]
    if isinstance(value, bytearray | memoryview):
        buffers.append(bytes(cast("memoryview[int]", value)))
        return ["b", len(buffers) - 1]
    if isinstance(value, int | float | str):
        # A subclass, as numpy's float64 is: what is in it travels, its class does not.
        return value
    raise FrameError(
        f"{type(value).__name__} cannot be in a frame; register it if it is a frozen dataclass"
    )


def _unpack(packed: object, buffers: list[bytes]) -> object:
    if isinstance(packed, list):
        return _unpack_tagged(cast("list[Any]", packed), buffers)
    if isinstance(packed, dict):
        return {
            key: _unpack(item, buffers) for key, item in cast("dict[str, object]", packed).items()
        }
    return packed


def _unpack_tagged(packed: list[Any], buffers: list[bytes]) -> object:
    tag = cast("str", packed[0])
    match tag:
        case "b":
            return buffers[cast("int", packed[1])]
        case "d":
            return _build(packed, buffers)
        case "t":
            return tuple([_unpack(item, buffers) for item in packed[1:]])
        case "l":
            return [_unpack(item, buffers) for item in packed[1:]]
        case "e":
            return _errors[cast("str", packed[1])](packed[2])
        case _:
            raise FrameError(f"a frame has no tag {tag!r}")


def _build(packed: list[Any], buffers: list[bytes]) -> object:
    cls = _classes.get(packed[1])
    if cls is None:
        raise FrameError(f"{packed[1]!r} is not registered on this side")
    names = _fields[cls][1]
    if len(packed) - 2 != len(names):
        raise FrameError(
            f"{packed[1]} has {len(names)} fields here and {len(packed) - 2} in the frame; "
            "both sides must run the same version"
        )
    values = [_unpack(item, buffers) if type(item) in _NESTED else item for item in packed[2:]]
    return cls(**dict(zip(names, values, strict=True)))


def _register_errors(base: type[LiloError]) -> None:
    _errors[base.kind] = base
    for subclass in base.__subclasses__():
        if subclass.__module__ == errors.__name__:
            _register_errors(subclass)


def _register_modules() -> None:
    for module in (command, datum, operation, reference, result, tensor):
        for value in list(vars(module).values()):
            if dataclasses.is_dataclass(value) and isinstance(value, type):
                register(value)


_register_errors(LiloError)
_register_modules()
