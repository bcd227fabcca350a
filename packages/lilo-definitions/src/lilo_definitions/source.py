"""From the `source` of a model to a folder on this machine.

Not a downloader: a source is a directory, or data inside an installed package. Trainer, sampler and front resolve
the same string on their own machines, so that no absolute path travels between them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from lilo_definitions.errors import InvalidSource

_PACKAGE = "package:"


def resolve_source(source: str) -> Path:
    """Return the folder that holds the model's `config.json`.

    Args:
        source: a directory, or `package:MODULE/FOLDER` for data inside an installed package.

    Raises:
        InvalidSource: the package or folder is not there, or has no `config.json`.
    """
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
