"""Four wheels, four new environments: each package installs alone, imports whole, and does what its README shows."""

import ast
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.workspace.environments import (
    UV,
    Environment,
    build_all,
    clean_environment,
    install,
    one_wheel,
    run,
    run_readme,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

NAMES = ("lilo-volume", "lilo-definitions", "lilo-engine", "lilo-miles-backend")
OURS = set(NAMES)
ONLY_WITH_EXTRAS = {
    "lilo-volume": {"modal", "fsspec", "torch", "xxhash"},
    "lilo-definitions": set(),
    "lilo-engine": {"modal", "psycopg", "matplotlib", "tinker", "opentelemetry"},
    "lilo-miles-backend": {"fla", "triton"},
}
"""What a module of the package may miss where it is installed without extras."""
CHOSEN_BY_SET_UP = {"torch"}
"""Its floor is not tried here: older CPU builds are on no index that every machine has, and CUDA builds are gigabytes."""
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import {module} as top
missing = {{}}
for found in pkgutil.walk_packages(top.__path__, top.__name__ + "."):
    if ".alembic" in found.name or found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        missing[found.name] = error.name.partition(".")[0]
print(json.dumps(missing))
"""


@pytest.fixture(scope="module")
def dist(root, tmp_path_factory) -> Path:
    """A folder with four wheels and four source archives."""
    if not UV.is_file():
        pytest.skip("uv is not in this environment; make setup puts it there")
    return build_all(root, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def environments(dist, tmp_path_factory) -> dict[str, Environment]:
    """Filled as they are asked for, one for each package."""
    return {}


@pytest.fixture(params=NAMES)
def alone(request, dist, environments, tmp_path_factory) -> tuple[str, Environment]:
    """A package, and an environment that has it and what it asks for."""
    name: str = request.param
    if name not in environments:
        environments[name] = install(tmp_path_factory.mktemp(name), dist, name)
    return name, environments[name]


def test_a_wheel_holds_its_package_its_types_and_its_licence(dist, member):
    with zipfile.ZipFile(one_wheel(dist, member.name)) as archive:
        names = set(archive.namelist())
    here = {
        path.relative_to(member.source.parent).as_posix()
        for path in member.source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_a_source_archive_holds_its_changelog_and_licence(dist, member):
    (path,) = dist.glob(f"{member.module}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names


def test_a_package_brings_only_what_it_and_its_dependencies_ask_for(alone, members):
    name, environment = alone
    installed = environment.installed()
    if name == "lilo-volume":
        assert installed == {"lilo-volume"}
    wanted = _siblings(name, {member.name: member.project for member in members})
    assert installed & OURS == wanted | {name}


def _siblings(name: str, projects: dict[str, dict]) -> set[str]:
    """Packages of ours that one needs, at any depth."""
    asked = {Requirement(text).name for text in projects[name]["dependencies"]} & OURS
    return asked | {deeper for sibling in asked for deeper in _siblings(sibling, projects)}


def test_every_module_imports_with_declared_dependencies_only(alone, tmp_path):
    name, environment = alone
    program = IMPORT_ALL.format(module=name.replace("-", "_"))
    said = run(environment.python, "-c", program, cwd=tmp_path)
    missing = json.loads(said.splitlines()[-1])
    assert set(missing.values()) <= ONLY_WITH_EXTRAS[name], missing


def test_a_readme_does_what_it_shows(alone, members, tmp_path):
    name, environment = alone
    (member,) = (member for member in members if member.name == name)
    assert run_readme(member.folder / "README.md", environment, tmp_path) > 0


def test_a_readme_can_be_read_on_its_own(member):
    text = (member.folder / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if "://" not in link and not link.startswith("#")] == []


def test_with_the_engine_alone_doctor_says_what_to_install(dist, environments, tmp_path_factory):
    name = "lilo-engine"
    if name not in environments:
        environments[name] = install(tmp_path_factory.mktemp(name), dist, name)
    environment = environments[name]
    done = subprocess.run(  # Its exit code is part of the answer.
        [environment.bin / "lilo", "doctor"],
        cwd=environment.folder,
        env=clean_environment(COLUMNS="300"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install lilo-miles-backend" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_lower_bounds_are_true(name, dist, members, tmp_path):
    # The oldest versions that the package says it works with, and everything its README shows.
    (member,) = (member for member in members if member.name == name)
    projects = {member.name: member.project for member in members}
    asked = [
        text
        for package in (name, *_siblings(name, projects))
        for text in projects[package]["dependencies"]
        if Requirement(text).name not in OURS
    ]
    oldest = install(tmp_path, dist, name, options=("--resolution", "lowest-direct", *asked))
    floors = {
        canonicalize_name(r.name): next(s.version for s in r.specifier if s.operator == ">=")
        for r in map(Requirement, member.project["dependencies"])
        if r.name not in OURS | CHOSEN_BY_SET_UP
    }
    frozen = run(UV, "pip", "freeze", "--python", oldest.python, cwd=tmp_path)
    got = dict(line.split("==") for line in frozen.splitlines() if "==" in line)
    for package, floor in floors.items():
        assert got[package].startswith(floor), (package, got[package])
    run_readme(member.folder / "README.md", oldest, tmp_path)


def test_no_module_imports_a_package_that_is_not_declared(member):
    extras = member.project.get("optional-dependencies", {})
    texts = [
        *member.project["dependencies"],
        *(text for group in extras.values() for text in group),
    ]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    allowed = declared | {canonicalize_name(name) for name in GIVEN_BY_OTHERS}
    for path in member.modules():
        for name in _imported(path) - set(sys.stdlib_module_names) - {member.module}:
            distribution = canonicalize_name(DISTRIBUTIONS.get(name, name))
            assert distribution in allowed, f"{path}: {name} is not declared"


DISTRIBUTIONS = {
    "google": "protobuf",
    "yaml": "pyyaml",
    "megatron": "megatron-core",
    "opentelemetry": "opentelemetry-sdk",
    "fla": "fla-core",
}
"""Import name -> distribution, where they differ beyond dashes."""
GIVEN_BY_OTHERS = {"starlette", "pydantic-core", "triton", "liger-kernel"}
"""What a declared dependency is made of and hands out: FastAPI of Starlette, pydantic of its core, torch's builds for CUDA
of Triton. Liger is only measured against, where somebody has it: it would bring Triton to machines without a GPU."""


def _imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, at any depth of it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names
