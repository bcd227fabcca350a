"""The safetensors files of a model: opened once, checked against its shape, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lilo_engine.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from lilo_miles_backend.families.shape import ModelShape

if TYPE_CHECKING:
    import torch


Index: TypeAlias = tuple[slice, ...]
"""One slice for each of the first dimensions."""


class _Index(BaseModel):
    """`model.safetensors.index.json`, as far as it is read."""

    model_config = ConfigDict(frozen=True)

    weight_map: dict[str, str]


class ReadTensor(Protocol):
    """Reads a tensor by its Hugging Face name, as it lies in the files."""

    def __call__(self, name: str, index: Index | None = None) -> torch.Tensor:
        """The tensor, or only its part at `index`: a view of the mapped file, so that nothing else is copied."""
        ...


@contextmanager
def open_tensors(folder: Path, shape: ModelShape) -> Iterator[ReadTensor]:
    """Open a model's files and check the names in them.

    Raises:
        InvalidRequest: a file cannot be read, or a tensor is missing, unexpected, or of another shape; the message
            names it.
    """
    sizes = shape.tensors
    with ExitStack() as stack:
        opened = _open(folder, stack)
        _check_names(set(sizes), set(opened), shape, folder)

        def read(name: str, index: Index | None = None) -> torch.Tensor:
            found = opened[name].get_slice(name)
            if tuple(found.get_shape()) != sizes[name]:
                raise InvalidRequest(
                    f"{folder}: {name} has shape {list(found.get_shape())}; "
                    f"config.json makes it {list(sizes[name])}"
                )
            tensor: torch.Tensor = opened[name].get_tensor(name) if index is None else found[index]
            return tensor

        yield read


def _open(folder: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Every tensor name in the folder, with the open file that holds it."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        try:
            weight_map = _Index.model_validate_json(index.read_bytes()).weight_map
        except (OSError, ValidationError) as error:
            raise InvalidRequest(
                f"{index} does not say which file holds which tensor; expected "
                f'{{"weight_map": {{TENSOR: FILE}}}}, so download the model again: {error}'
            ) from error
        files = sorted(set(weight_map.values()))
    opened: dict[str, safe_open] = {}
    for name in files:
        try:
            handle = stack.enter_context(safe_open(folder / name, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"cannot read the model weights {folder / name}: {error}"
            ) from error
        opened.update(dict.fromkeys(handle.keys(), handle))
    return opened


def _check_names(wanted: set[str], found: set[str], shape: ModelShape, folder: Path) -> None:
    if shape.tie_word_embeddings:
        # Some writers store the tied head a second time.
        found = found - {"lm_head.weight"}
    found = {name for name in found if not name.startswith(shape.left_out)}
    missing, unexpected = sorted(wanted - found), sorted(found - wanted)
    if missing or unexpected:
        raise InvalidRequest(
            f"the weights in {folder} do not fit its config.json: "
            f"{len(missing)} missing (first: {missing[:3]}), {len(unexpected)} unexpected (first: {unexpected[:3]})"
        )
