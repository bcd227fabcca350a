"""The wheels: all four build, and each installs and imports alone in a new environment."""

import os
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

UV = Path(sys.executable).with_name("uv")


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH")
    }
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(root, tmp_path_factory) -> Path:
    """A folder with the four wheels."""
    if not UV.is_file():
        pytest.skip("uv is not in this environment; make setup puts it there")
    folder = tmp_path_factory.mktemp("dist")
    run(
        *(UV, "build", "--quiet", "--all-packages", "--wheel", "--no-sources"),
        *("--python", sys.executable, "--out-dir", folder),
        cwd=root,
    )
    return folder


def wheel(dist: Path, member) -> Path:
    (path,) = dist.glob(f"{member.module}-{member.project['version']}-*.whl")
    return path


def test_a_wheel_holds_its_package_its_types_and_its_licence(dist, member):
    with zipfile.ZipFile(wheel(dist, member)) as archive:
        names = set(archive.namelist())
    here = {
        path.relative_to(member.source.parent).as_posix()
        for path in member.source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("lilo-volume", "import lilo_volume"),
        (
            "lilo-definitions",
            "import lilo_definitions as d; d.check_fits_model(d.get('tiny'))",
        ),
        ("lilo-engine", "import lilo_engine, lilo_engine.app, lilo_engine.cli"),
    ],
)
def test_a_wheel_installs_and_imports_alone(dist, members, tmp_path, name, statement):
    (member,) = (member for member in members if member.name == name)
    venv = tmp_path / "venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    # Siblings come from the folder; what it has not comes from the index.
    run(
        *(UV, "pip", "install", "--quiet", "--python", python, "--find-links", dist),
        wheel(dist, member),
        cwd=tmp_path,
    )
    run(python, "-W", "error::SyntaxWarning", "-c", statement, cwd=tmp_path)
    if name == "lilo-engine":
        _answers_without_a_trainer(venv, tmp_path)


def _answers_without_a_trainer(venv: Path, folder: Path) -> None:
    """With lilo-engine alone, `lilo` works and `lilo doctor` says what to install."""
    lilo = venv / "bin" / "lilo"
    assert "tiny" in run(lilo, "definitions", "list", cwd=folder)
    done = subprocess.run(
        [lilo, "doctor"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "pip install lilo-miles-backend" in done.stdout


def test_the_backends_wheel_asks_for_torch_and_its_siblings(dist, members):
    # Installing it would bring torch; what it asks for and what it offers can be read.
    (member,) = (member for member in members if member.name == "lilo-miles-backend")
    with zipfile.ZipFile(wheel(dist, member)) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        asked = BytesParser().parsebytes(archive.read(metadata)).get_all("Requires-Dist") or []
        (points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        offered = archive.read(points).decode()
    floors = {requirement.name: requirement for requirement in map(Requirement, asked)}
    assert {"lilo-definitions", "lilo-engine", "lilo-volume", "megatron-core"} <= set(floors)
    assert not floors["torch"].specifier.contains("2.10.0")
    assert floors["torch"].specifier.contains("2.11.0")
    assert "[lilo.backends]" in offered
    assert "[lilo.samplers]" in offered
