"""Every field of a definition, each with another value that it may have."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from lilo_definitions import Pool
from pydantic import BaseModel


def fields_of(part: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and another value of every field, at any depth."""
    for name, info in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from fields_of(value, (*path, name))
        else:
            yield (*path, name), another(value, info.annotation)


POOL = {
    "gpu": "H200",
    "gpus_per_replica": 1,
    "min_replicas": 1,
    "max_replicas": 2,
    "target_sequences": 4,
}


def another(value: Any, annotation: Any) -> Any:
    """A value of the same type that differs."""
    kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation)
    for kind in (annotation, *kinds):
        if get_origin(kind) is Literal:
            return next(choice for choice in get_args(kind) if choice != value)
    if value is None:
        (kind,) = (kind for kind in kinds if kind is not type(None))
        return {int: 1, float: 1.5, str: "another", Pool: POOL}[kind]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if isinstance(value, float) else value + 1
    if isinstance(value, tuple):
        return value[:-1] if len(value) > 1 else (*value, "another")
    return f"{value}-other"


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """What `Definition.derive` takes to change one field."""
    for name in reversed(path[1:]):
        value = {name: value}
    return {path[0]: value}
