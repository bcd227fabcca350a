"""One release of one package: `python scripts/release.py bump|check|notes|build|try|publish|rehearse`. See RELEASING.md.

A tag is `<distribution>-v<version>`, as lilo-volume-v0.2.0. Every step is a command of its own, so that the workflow and a
person do the same. `rehearse` does all of them on a copy of the tree, against an index on the loopback interface.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from local_index import LocalIndex

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
NOT_COPIED = shutil.ignore_patterns(".venv", ".git", "dist", "site", "__pycache__", ".*_cache")


class Refused(Exception):
    """Why a release cannot go on, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package of a tree."""

    root: Path
    name: str

    @property
    def folder(self) -> Path:
        """Of the package."""
        return self.root / "packages" / self.name

    @property
    def changelog(self) -> Path:
        """Its changelog."""
        return self.folder / "CHANGELOG.md"

    @property
    def version(self) -> str:
        """As its pyproject.toml says."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text("utf-8"))["project"]
        return str(project["version"])

    def section(self, version: str) -> str:
        """What the changelog says of a version.

        Raises:
            Refused: there is no dated section, or nothing in it.
        """
        text = self.changelog.read_text("utf-8")
        heading = rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
        found = re.search(heading, text, re.MULTILINE | re.DOTALL)
        if found is None:
            raise Refused(
                f"{self.changelog} has no section '## {version} - YYYY-MM-DD'; give the lines under Unreleased "
                "that heading"
            )
        if not found[1].strip():
            raise Refused(f"{self.changelog} says nothing under {version}; write what changed")
        return found[1].strip() + "\n"


def package(root: Path, name: str) -> Package:
    """A package by its name.

    Raises:
        Refused: there is none; those there are.
    """
    names = sorted(path.parent.name for path in (root / "packages").glob("*/pyproject.toml"))
    if name not in names:
        raise Refused(f"there is no package {name!r}; there are {', '.join(names)}")
    return Package(root=root, name=name)


def parse_tag(root: Path, tag: str) -> tuple[Package, str]:
    """Package and version of a tag.

    Raises:
        Refused: it is none of ours.
    """
    found = re.fullmatch(rf"([a-z][a-z-]*)-v({VERSION})", tag)
    if found is None:
        raise Refused(
            f"the tag {tag!r} is not <distribution>-v<version>, for example lilo-volume-v0.2.0"
        )
    return package(root, found[1]), found[2]


def bump(root: Path, name: str, version: str, date: str) -> None:
    """Write the new version, date the changelog's lines, and lock."""
    if not re.fullmatch(VERSION, version):
        raise Refused(f"{version!r} is no version; write MAJOR.MINOR.PATCH, or with rc1 behind it")
    ours = package(root, name)
    project = ours.folder / "pyproject.toml"
    text = project.read_text("utf-8")
    project.write_text(
        text.replace(f'\nversion = "{ours.version}"\n', f'\nversion = "{version}"\n'), "utf-8"
    )
    log = ours.changelog.read_text("utf-8")
    ours.changelog.write_text(
        log.replace("\n## Unreleased\n", f"\n## Unreleased\n\n## {version} - {date}\n", 1), "utf-8"
    )
    run("lock", "--quiet", "--python", sys.executable, cwd=root)


def check(root: Path, tag: str) -> None:
    """A tag names the version that is written down, and the changelog speaks of it.

    Raises:
        Refused: otherwise.
    """
    ours, version = parse_tag(root, tag)
    if ours.version != version:
        raise Refused(
            f"the tag {tag!r} says {version}, but {ours.folder / 'pyproject.toml'} says {ours.version}"
        )
    ours.section(version)


def build(root: Path, name: str, out: Path) -> list[Path]:
    """Wheel and source archive, the wheel from the archive, without leaning on the workspace."""
    options = ("--quiet", "--no-sources", "--python", sys.executable, "--out-dir", str(out))
    run("build", "--package", name, *options, cwd=root)
    module, version = name.replace("-", "_"), package(root, name).version
    return sorted(path for path in out.glob(f"{module}-{version}*") if path.is_file())


def try_out(wheel: Path, links: Path, index: str | None = None) -> None:
    """Install a wheel, and only what it asks for, into a new environment, and import it."""
    module = wheel.name.split("-")[0]
    with tempfile.TemporaryDirectory(prefix="lilo-release-") as folder:
        python = Path(folder) / "venv" / "bin" / "python"
        run("venv", "--quiet", "--python", sys.executable, str(python.parents[1]), cwd=folder)
        found = ("--extra-index-url", index) if index else ("--find-links", str(links))
        install = ("pip", "install", "--quiet", "--python", str(python), *found)
        what = requirement_of(wheel) if index else str(wheel)
        run(*install, "--refresh-package", module.replace("_", "-"), what, cwd=folder)
        run("pip", "check", "--quiet", "--python", str(python), cwd=folder)
        subprocess.run([python, "-c", f"import {module}"], check=True, cwd=folder, timeout=120)


def requirement_of(wheel: Path) -> str:
    """`lilo-volume==0.2.0`, from the wheel's name."""
    module, version, _ = wheel.name.split("-", 2)
    return f"{module.replace('_', '-')}=={version}"


def publish(files: list[Path], url: str, user: str | None = None) -> None:
    """Upload exactly these files; on a workflow the right to do so comes from the index's trust in it."""
    trust = ("--trusted-publishing", "automatic")
    if user is not None:
        trust = ("--trusted-publishing", "never", "--username", user, "--password", user)
    run("publish", "--quiet", "--publish-url", url, *trust, *map(str, files), cwd=ROOT)


def rehearse(root: Path, name: str) -> dict[str, object]:
    """All steps for the next patch version, on a copy of the tree and an index of our own; what was done."""
    with tempfile.TemporaryDirectory(prefix="lilo-rehearsal-") as folder, LocalIndex() as index:
        copy, out = Path(folder) / "tree", Path(folder) / "dist"
        shutil.copytree(root, copy, ignore=NOT_COPIED, symlinks=True)
        ours = package(copy, name)
        major, minor, patch = map(int, ours.version.split("rc")[0].split("."))
        version = f"{major}.{minor}.{patch + 1}"
        tag = f"{name}-v{version}"
        bump(copy, name, version, datetime.date.today().isoformat())
        check(copy, tag)
        notes = ours.section(version)
        files = build(copy, name, out)
        (wheel,) = (path for path in files if path.suffix == ".whl")
        try_out(wheel, out)
        publish(files, index.upload_url, user="rehearsal")
        try_out(wheel, out, index=index.simple_url)
        return {
            "tag": tag,
            "uploaded": index.names(),
            "same_bytes": all(index.content(path.name) == path.read_bytes() for path in files),
            "notes_lines": len(notes.splitlines()),
        }


def run(*command: str, cwd: Path | str) -> None:
    """uv, without the environment that this process happens to be in."""
    given = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH")
    }
    # Proxies are for the outside; the rehearsal's index is on this machine.
    given["NO_PROXY"] = given["no_proxy"] = ",".join(
        filter(None, (given.get("no_proxy"), "127.0.0.1,localhost"))
    )
    done = subprocess.run(
        [str(UV), *command], cwd=cwd, env=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Refused(f"uv {' '.join(command[:2])} failed:\n{done.stdout}{done.stderr}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="release", description=(__doc__ or "").splitlines()[0])
    steps = top.add_subparsers(dest="step", required=True)
    one = steps.add_parser("bump", help="write a version, date the changelog, lock")
    one.add_argument("name")
    one.add_argument("version")
    for step, words in (("check", "refuse a tag that does not fit"), ("notes", "its changelog")):
        steps.add_parser(step, help=words).add_argument("tag")
    for step, words in (
        ("build", "wheel and source archive of a tag into dist/"),
        ("try", "install the wheel of a tag from dist/ into a new environment"),
        ("publish", "upload what lies in dist/ for a tag"),
    ):
        one = steps.add_parser(step, help=words)
        one.add_argument("tag")
        one.add_argument("--dist", type=Path, default=ROOT / "dist")
        if step == "publish":
            one.add_argument("--url", required=True, help="where the index takes uploads")
    steps.add_parser("rehearse", help="all of it on a copy").add_argument("name")
    return top


def main() -> int:
    """Do one step; a refusal is one line."""
    given = parser().parse_args()
    try:
        match given.step:
            case "bump":
                bump(ROOT, given.name, given.version, datetime.date.today().isoformat())
            case "check":
                check(ROOT, given.tag)
            case "rehearse":
                print(rehearse(ROOT, given.name))
            case "notes":
                ours, version = parse_tag(ROOT, given.tag)
                print(ours.section(version), end="")
            case _:
                files_step(given)
    except Refused as refusal:
        print(f"release: {refusal}", file=sys.stderr)
        return 1
    return 0


def files_step(given: argparse.Namespace) -> None:
    """The steps about the files of a tag."""
    ours, version = parse_tag(ROOT, given.tag)
    if given.step == "build":
        print("\n".join(map(str, build(ROOT, ours.name, given.dist))))
        return
    module = ours.name.replace("-", "_")
    files = sorted(p for p in given.dist.glob(f"{module}-{version}*") if p.is_file())
    wheels = [path for path in files if path.suffix == ".whl"]
    if len(files) != 2 or len(wheels) != 1:
        raise Refused(
            f"{given.dist} has {len(files)} files of {given.tag}; expected a wheel and a source archive: build first"
        )
    if given.step == "try":
        try_out(wheels[0], given.dist)
    else:
        publish(files, given.url)


if __name__ == "__main__":
    sys.exit(main())
