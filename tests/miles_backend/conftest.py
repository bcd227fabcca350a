"""One backend per model for all tests of a file's process: starting one imports Megatron, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from lilo_definitions import Definition, get
from lilo_miles_backend import MilesBackend

from tests.miles_backend import reference as ref

_numbers = count()


@pytest.fixture(scope="session")
def tiny_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilesBackend]:
    backend = ref.start(get("tiny"), tmp_path_factory.mktemp("tiny"))
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Definition]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": ref.write_random_model(folder / "tied", tied=True),
        "untied": ref.write_random_model(folder / "untied", tied=False),
    }


@pytest.fixture(scope="session")
def tied_backend(
    random_models: dict[str, Definition], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilesBackend]:
    backend = ref.start(random_models["tied"], tmp_path_factory.mktemp("tied"))
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def untied_backend(
    random_models: dict[str, Definition], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilesBackend]:
    backend = ref.start(random_models["untied"], tmp_path_factory.mktemp("untied"))
    yield backend
    backend.close()


@pytest.fixture
def model_id(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name that no other test uses; its slot is freed afterwards."""
    name = f"model-{next(_numbers)}"
    yield name
    for backend in {"tiny_backend", "tied_backend", "untied_backend"} & set(request.fixturenames):
        request.getfixturevalue(backend).unload(name)
