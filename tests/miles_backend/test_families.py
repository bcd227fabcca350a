"""The files of a model, as trainer and sampler both read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lilo_definitions import get, resolve_source
from lilo_engine.errors import InvalidRequest
from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.families.shape import LayerKind
from lilo_miles_backend.sampler.weights import read_base
from safetensors.torch import load_file, save_file

from tests.miles_backend.random_families import HYBRID, MODELS, write_model

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


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_refused_by_its_name(
    folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with (
        pytest.raises(InvalidRequest, match=r"model\.safetensors\.index\.json"),
        open_tensors(tmp_path, read_shape(folder)),
    ):
        pass


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


HYBRID_CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    **{name: size for name, size in HYBRID.items() if name != "rope_parameters"},
}


def _described(tmp_path: Path, **changes: object) -> Path:
    """A folder whose configuration is a hybrid's with some fields changed; None: without them."""
    config = {k: v for k, v in {**HYBRID_CONFIG, **changes}.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_hybrid_is_read_with_its_kinds_of_layers_and_a_quarter_of_each_head_rotated(
    tmp_path: Path,
) -> None:
    shape = read_shape(_described(tmp_path, num_hidden_layers=8))
    assert shape.layers == ("delta", "delta", "delta", "softmax") * 2
    assert (shape.rotary_dim, shape.head_dim) == (8, 32)
    assert shape.norm_offset
    assert shape.output_gate


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen4_exp"}, "qwen4_exp"),
        ({"model_type": None}, "None"),
        ({"model_type": "qwen3_5_moe_text"}, "qwen3_5_moe_text"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type"),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_type": "x"}}, "x"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            "linear",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["window"] * 4}, "layer_types"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        read_shape(_described(tmp_path, **changes))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_names_the_tensors_that_transformers_writes(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    shape = read_shape(tmp_path)
    written = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items()}
    read = {n: size for n, size in written.items() if not n.startswith(shape.left_out or ("\0",))}
    assert dict(shape.tensors) == read
    assert (len(read) < len(written)) == (name == "qwen3_5 multimodal")


def test_of_what_a_file_holds_besides_only_vision_and_prediction_layers_are_left_out(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, "qwen3_5 multimodal")
    shape = read_shape(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path, shape) as read:
        assert read("model.language_model.norm.weight").shape == (64,)
    save_file(tensors | {"model.audio.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(InvalidRequest, match=r"model\.audio\.weight"),
        open_tensors(tmp_path, shape),
    ):
        pass


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["softmax", "delta"])
def test_ranks_share_out_every_row_of_a_linear_once(
    tmp_path: Path, kind: LayerKind, tp: int
) -> None:
    for linear in read_shape(_described(tmp_path)).linears(kind).values():
        size = linear.out_features if linear.cut == "out" else linear.in_features
        held = [
            place
            for rank in range(tp)
            for section in linear.sections
            for start, stop in section.ranges(rank, tp)
            for place in range(start, stop)
        ]
        assert sorted(held) == list(range(size))
