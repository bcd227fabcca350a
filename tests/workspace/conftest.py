"""The four packages as the workspace tests see them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One package of the workspace."""

    name: str
    """Of the distribution, with dashes."""
    folder: Path
    project: dict[str, Any]
    """The `[project]` table."""

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    def modules(self) -> list[Path]:
        """Hand-written Python files."""
        found = sorted(self.source.rglob("*.py"))
        return [path for path in found if not path.name.endswith("_pb2.py")]


def read_members() -> list[Member]:
    members: list[Member] = []
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        members.append(Member(name=project["name"], folder=path.parent, project=project))
    return members


MEMBERS = read_members()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `member` runs once for each package."""
    if "member" in metafunc.fixturenames:
        metafunc.parametrize("member", MEMBERS, ids=[member.name for member in MEMBERS])


@pytest.fixture(scope="session")
def members() -> list[Member]:
    return MEMBERS


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
