"""The files of a model, as trainer and sampler both read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lilo_definitions import get, resolve_source
from lilo_engine.errors import InvalidRequest
from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.sampler.weights import read_base
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder() -> Path:
    return resolve_source(get("tiny").model.source)


def _without_a_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def _with_a_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(1)


def _with_a_narrow_projection(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, 1:].contiguous()


def test_the_configuration_names_every_tensor_of_the_files_with_its_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert read_shape(folder).tensors == {n: tuple(t.shape) for n, t in tensors.items()}


@pytest.mark.parametrize("spoil", [_without_a_norm, _with_a_bias, _with_a_narrow_projection])
def test_a_sampler_refuses_files_that_do_not_fit_their_configuration(
    folder: Path, tmp_path: Path, spoil: Callable[[Tensors], None]
) -> None:
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(InvalidRequest):
        read_base(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_tensors_are_read_in_parts(folder: Path) -> None:
    shape = read_shape(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = shape.tensors[name]
    with open_tensors(folder, shape) as read:
        whole = read(name)
        for index in (
            (slice(0, rows // 2), slice(0, columns)),
            (slice(0, rows), slice(columns // 2, columns)),
        ):
            assert torch.equal(read(name, index), whole[index])
