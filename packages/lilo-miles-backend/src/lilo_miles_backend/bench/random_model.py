"""Random models: weights of published shapes, as folders in Hugging Face form that a definition's source can name.

A layer is a file, written once and linked by every folder that has this layer, so that 8 and 36 layers of one shape
take the room of 36. Numbers are random, never zero: zeros multiply faster. Not trained: only speed, memory and
agreement of two computations mean anything on them.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lilo_definitions.architecture import Architecture, LinearAttention
from lilo_definitions.families import qwen3, qwen3_5
from safetensors.torch import save_file
from transformers import AutoConfig

from lilo_miles_backend.families.read import read_shape

SHAPES: Mapping[str, Architecture] = {
    "8b": replace(qwen3.ARCHITECTURES["Qwen/Qwen3-8B"], context=262_144),
    "0.6b": replace(qwen3.ARCHITECTURES["Qwen/Qwen3-0.6B"], context=262_144),
    "27b": qwen3_5.ARCHITECTURES["Qwen/Qwen3.8-27B"],
    "small": Architecture(
        family="qwen3",
        layers=2,
        hidden=64,
        inner=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=256,
        context=4096,
        tied=False,
    ),
    "small-hybrid": Architecture(
        family="qwen3_5",
        layers=4,
        hidden=64,
        inner=96,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocab=256,
        context=4096,
        tied=False,
        linear=LinearAttention(key_heads=2, value_heads=4, key_dim=16, value_dim=16),
    ),
}
"""By the name that cases use."""

_LAYER = re.compile(r"layers\.(\d+)\.")
_ROOM = 8 << 30
"""Left free in memory-backed folders."""


def roomy(needed: int = 40 << 30) -> Path:
    """A parent for such folders: memory if there is enough of it, else the disk."""
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > needed + _ROOM:
        return shared
    return Path(tempfile.gettempdir())


def model_folder(
    root: Path, name: str, layers: int | None = None, interval: int | None = None
) -> tuple[Path, Architecture]:
    """A folder with this shape of `SHAPES`, of so many layers; written if it is not there.

    Args:
        root: where the folders lie; one for all processes that measure together.
        name: of `SHAPES`.
        layers: None: as the shape has.
        interval: of a hybrid, every so-many-th layer has softmax attention; None: as the shape has.
    """
    architecture = SHAPES[name]
    if layers is not None:
        architecture = replace(architecture, layers=layers)
    if interval is not None and architecture.linear is not None:
        architecture = replace(architecture, linear=replace(architecture.linear, interval=interval))
    store = root / name
    folder = root / "-".join(
        [name, str(architecture.layers), *([f"every{interval}"] if interval else [])]
    )
    store.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{name}.lock"):
        if not (folder / "config.json").exists():
            _write(architecture, store, folder)
    return folder, architecture


def _write(architecture: Architecture, store: Path, folder: Path) -> None:
    """Write what the store lacks, then link it; the configuration last, since it says that all is there."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / "config.json").write_text(json.dumps(config_of(architecture)), "utf-8")
    shape = read_shape(partial)
    tensors = shape.tensors
    files: dict[str, list[str]] = {}
    for tensor in tensors:
        name = "rest.safetensors"
        if found := _LAYER.search(tensor):
            layer = int(found[1])
            name = f"{shape.layers[layer]}-{layer:03d}.safetensors"
        files.setdefault(name, []).append(tensor)
    missing = [name for name in files if not (store / name).exists()]
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda name: _file(
                    store / name, {t: tensors[t] for t in files[name]}, offset=shape.norm_offset
                ),
                missing,
            )
        )
    for name in files:
        (partial / name).symlink_to(store / name)
    index = {"metadata": {}, "weight_map": {t: name for name in files for t in files[name]}}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    partial.rename(folder)


def _file(path: Path, shapes: Mapping[str, tuple[int, ...]], *, offset: bool) -> None:
    temporary = path.with_suffix(".partial")
    save_file(dict(_tensors(shapes, offset)), temporary, metadata={"format": "pt"})
    temporary.rename(path)


def _tensors(
    shapes: Mapping[str, tuple[int, ...]], offset: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in shapes.items():
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=device)
        yield name, _scaled(name, drawn, offset).cpu()


def _scaled(name: str, drawn: torch.Tensor, offset: bool) -> torch.Tensor:
    """As a trained model's are: matrices small, norms about one, decays of a delta net from 0.02 to 0.6 a token."""
    if name.endswith("A_log"):
        return (0.02 + 0.58 * drawn.sigmoid()).log()
    if drawn.dim() == 1:
        one = "norm" in name and not (offset and "linear_attn" not in name)
        return (0.1 * drawn + one).to(torch.float32 if "dt_bias" in name else torch.bfloat16)
    return (0.02 * drawn if "conv1d" not in name else 0.3 * drawn).bfloat16()


def config_of(architecture: Architecture) -> dict[str, Any]:
    """`config.json` of a shape, by transformers' own class for the family."""
    sizes: dict[str, Any] = {
        "vocab_size": architecture.vocab,
        "hidden_size": architecture.hidden,
        "intermediate_size": architecture.inner,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_dim,
        "max_position_embeddings": architecture.context,
        "tie_word_embeddings": architecture.tied,
    }
    kind: str = architecture.family
    if (line := architecture.linear) is not None:
        kind = f"{kind}_text"
        sizes |= {
            "linear_num_key_heads": line.key_heads,
            "linear_num_value_heads": line.value_heads,
            "linear_key_head_dim": line.key_dim,
            "linear_value_head_dim": line.value_dim,
            "linear_conv_kernel_dim": line.conv_kernel,
            "layer_types": [
                "linear_attention" if (layer + 1) % line.interval else "full_attention"
                for layer in range(architecture.layers)
            ],
        }
    return AutoConfig.for_model(kind, **sizes).to_dict()
