"""Each package keeps the rules that all of them share."""

import ast
import importlib
import tomllib
from importlib.metadata import entry_points, version
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

MAX_LINES = 500


def test_there_are_four_packages(members):
    names = ["lilo-definitions", "lilo-engine", "lilo-miles-backend", "lilo-volume"]
    assert [member.name for member in members] == names


def test_a_package_has_the_files_a_reader_and_an_index_need(member):
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):
        assert (member.folder / name).is_file(), name
    assert (member.source / "py.typed").is_file()
    assert (member.folder / "README.md").read_text().startswith(f"# {member.name}\n")
    assert "\n## Unreleased\n" in (member.folder / "CHANGELOG.md").read_text()


def test_a_package_carries_the_licence_of_the_repository(member, root):
    assert (member.folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    assert member.project["license"] == "Apache-2.0"


def test_the_installed_version_is_the_one_written_down(member):
    assert version(member.name) == member.project["version"]


def test_all_packages_support_the_same_pythons(members, root):
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert {member.project["requires-python"] for member in members} == {
        workspace["requires-python"]
    }


def test_bounds_between_packages_admit_their_present_versions(members):
    # The lock does not check these: siblings are taken from the workspace whatever their version.
    versions = {member.name: member.project["version"] for member in members}
    for member in members:
        for requirement in map(Requirement, member.project["dependencies"]):
            if sibling := versions.get(requirement.name):
                assert requirement.specifier.contains(sibling), (member.name, str(requirement))
                operators = {specifier.operator for specifier in requirement.specifier}
                assert operators == {">=", "<"}, (member.name, str(requirement))


def test_every_dependency_has_a_floor(member):
    extras = member.project.get("optional-dependencies", {})
    written = [*member.project.get("dependencies", []), *(r for rs in extras.values() for r in rs)]
    for requirement in map(Requirement, written):
        assert requirement.specifier != SpecifierSet(), f"{requirement} has no lower bound"


def test_every_entry_point_and_command_resolves(member):
    groups = dict(member.project.get("entry-points", {}))
    if scripts := member.project.get("scripts"):
        groups["console_scripts"] = scripts
    for group, points in groups.items():
        for name, value in points.items():
            (point,) = entry_points(group=group, name=name)
            assert point.value == value
            assert point.load() is not None


def test_all_lists_exactly_the_public_names(member):
    for path in member.source.rglob("__init__.py"):
        parts = path.parent.relative_to(member.source.parent).parts
        if "alembic" in parts:  # Migrations are files for alembic to run, not a package to import.
            continue
        module = importlib.import_module(".".join(parts))
        listed = set(getattr(module, "__all__", ()))
        assert all(hasattr(module, name) for name in listed), module.__name__
        public = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, ModuleType)
        } - {"annotations"}
        lazy = listed - set(vars(module))  # Served by a module-level __getattr__.
        assert public | lazy == listed | (public & {"TYPE_CHECKING"}), module.__name__


def test_no_module_is_long_and_each_says_what_it_is(member):
    for path in member.modules():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_LINES, path
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
