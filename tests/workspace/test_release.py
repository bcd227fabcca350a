"""The steps of a release: what they refuse, and one whole release against an index of its own."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import release  # noqa: E402

PYPROJECT = '[project]\nname = "{name}"\nversion = "{version}"\n'


@pytest.fixture
def tree(tmp_path) -> Path:
    """Two packages, one of which is ready to be tagged."""
    for name, version, log in (
        (
            "lilo-volume",
            "0.2.0",
            "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-11-30\n\n- It works.\n",
        ),
        ("lilo-engine", "0.1.0", "# Changelog\n\n## Unreleased\n\n- Something.\n"),
    ):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, version=version))
        (folder / "CHANGELOG.md").write_text(log)
    return tmp_path


def test_a_tag_that_fits_passes_and_its_notes_are_the_changelogs_section(tree):
    release.check(tree, "lilo-volume-v0.2.0")
    assert release.package(tree, "lilo-volume").section("0.2.0") == "- It works.\n"


@pytest.mark.parametrize(
    ("tag", "because"),
    [
        ("v0.2.0", "lilo-volume-v"),
        ("lilo-volume-0.2.0", "lilo-volume-v"),
        ("lilo-volume-v0.2", "lilo-volume-v"),
        ("lilo-nothing-v0.2.0", "lilo-engine, lilo-volume"),
        ("lilo-volume-v0.3.0", "0.2.0"),
        ("lilo-engine-v0.1.0", "## 0.1.0"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused_with_what_would(tree, tag, because):
    with pytest.raises(release.Refused, match=because):
        release.check(tree, tag)


def test_a_dated_section_without_a_line_is_refused(tree):
    log = tree / "packages/lilo-volume/CHANGELOG.md"
    log.write_text(log.read_text().replace("- It works.\n", ""))
    with pytest.raises(release.Refused, match="what changed"):
        release.check(tree, "lilo-volume-v0.2.0")


def test_every_package_can_be_named_in_a_tag():
    for folder in (ROOT / "packages").iterdir():
        if (folder / "pyproject.toml").is_file():
            ours, version = release.parse_tag(ROOT, f"{folder.name}-v1.2.3rc1")
            assert (ours.name, version) == (folder.name, "1.2.3rc1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_release_goes_from_the_version_to_the_index_and_back():
    if shutil.which("uv") is None and not release.UV.is_file():
        pytest.skip("uv is not in this environment; make setup puts it there")
    done = release.rehearse(ROOT, "lilo-volume")
    assert done["same_bytes"]
    version = str(done["tag"]).removeprefix("lilo-volume-v")
    assert done["uploaded"] == [
        f"lilo_volume-{version}-py3-none-any.whl",
        f"lilo_volume-{version}.tar.gz",
    ]
