"""The documentation site: it builds without a warning, has a page for each kind of reader, and its examples run."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from lilo_engine.cli.main import COMMANDS, GROUP

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages(entries) -> list[str]:
    """Files of a navigation, at any depth."""
    found: list[str] = []
    for entry in entries:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        found += [value] if isinstance(value, str) else pages(value)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_strictly_and_names_what_each_package_offers(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for page, name in (
        ("reference/volume", "lilo_volume.attempt.begin"),
        ("reference/definitions", "lilo_definitions.Definition"),
        ("reference/engine", "lilo_engine.deploy.deployment.plan"),
    ):
        assert f'id="{name}"' in (tmp_path / page / "index.html").read_text("utf-8")


def test_there_is_a_page_for_each_kind_of_reader_and_every_page_of_the_navigation_exists():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    found = pages(yaml.safe_load(text)["nav"])
    assert {"researcher.md", "platform.md", "volume.md"} <= set(found)
    assert [page for page in found if not (ROOT / "docs" / page).is_file()] == []


def test_the_example_for_lilo_volume_alone_runs_as_written(tmp_path):
    (example,) = FENCE.findall((ROOT / "docs/volume.md").read_text("utf-8"))
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, timeout=50)
    assert (tmp_path / "checkpoints").is_dir()


@pytest.mark.parametrize("page", ["researcher.md", "README.md"])
def test_the_examples_that_need_a_server_are_python(page):
    path = ROOT / ("README.md" if page == "README.md" else f"docs/{page}")
    examples = FENCE.findall(path.read_text("utf-8"))
    assert examples
    for example in examples:
        compile(example, page, "exec")


def test_every_command_that_the_documentation_names_exists():
    commands = {*COMMANDS, *(point.name for point in entry_points(group=GROUP))}
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(
            r"^    (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?lilo ([a-z]+)", page.read_text("utf-8"), re.M
        ):
            assert name in commands, (page.name, name)
