"""The catalogue: names, misses, and what other packages add."""

import sys
from importlib.metadata import version
from pathlib import Path

import lilo_definitions
import pytest
from lilo_definitions import InvalidDefinition, UnknownDefinition


@pytest.fixture
def add_package(tmp_path, monkeypatch):
    """Put a distribution with one entry point of the group into the import path."""

    def add(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lilo.definitions]\n{name} = {name}:RECIPES\n")

    monkeypatch.syspath_prepend(tmp_path)
    yield add
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_tiny_is_there_by_name():
    definition = lilo_definitions.get("tiny")
    assert "tiny" in lilo_definitions.names()
    assert (definition.name, definition.context, definition.model.vocab_size) == ("tiny", 1024, 260)
    assert (definition.lora.slots, definition.lora.max_rank, definition.lora.alpha) == (
        32,
        32,
        32.0,
    )
    assert definition.lora.targets == ("attn", "mlp", "unembed")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownDefinition, match="tiny"):
        lilo_definitions.get("tinny")


def test_a_name_near_to_nothing_is_answered_with_all_there_are():
    with pytest.raises(UnknownDefinition, match=r"there are: .*tiny"):
        lilo_definitions.get("Qwen/Qwen3.8-27B:256k")


def test_an_installed_package_adds_definitions(add_package):
    add_package(
        "more_recipes",
        "from lilo_definitions.families.tiny import tiny\n"
        "def small(): return tiny().model_copy(update={'name': 'small'})\n"
        "RECIPES = {'small': small}\n",
    )
    assert {"small", "tiny"} <= set(lilo_definitions.names())
    assert lilo_definitions.get("small").name == "small"


def test_a_second_giver_of_a_name_is_refused(add_package):
    add_package("other_tiny", "RECIPES = {'tiny': lambda: None}\n")
    with pytest.raises(InvalidDefinition):
        lilo_definitions.names()


def test_a_catalogue_that_does_not_import_names_itself(add_package):
    add_package("broken_recipes", "import a_module_that_is_not_there\nRECIPES = {}\n")
    with pytest.raises(InvalidDefinition, match="broken_recipes"):
        lilo_definitions.names()


def test_a_recipe_under_another_name_is_refused(add_package):
    add_package(
        "misnamed", "from lilo_definitions.families.tiny import tiny\nRECIPES = {'large': tiny}\n"
    )
    with pytest.raises(InvalidDefinition):
        lilo_definitions.get("large")
    assert lilo_definitions.get("tiny").name == "tiny"


def test_a_broken_recipe_does_not_hide_the_others(add_package):
    add_package(
        "unfit",
        "from lilo_definitions import Topology\nRECIPES = {'unfit': lambda: Topology(tp=0)}\n",
    )
    with pytest.raises(InvalidDefinition):
        lilo_definitions.get("unfit")
    assert lilo_definitions.get("tiny").name == "tiny"


def test_package_data_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = lilo_definitions.resolve_source(lilo_definitions.get("tiny").model.source)
    assert folder.is_absolute()
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert Path(lilo_definitions.__file__).parent in folder.parents
    assert version("lilo-definitions")
