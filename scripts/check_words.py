"""Checks what linters cannot see: words that belong to one file, or to none. Run by `make lint`.

Each rule says where it looks, what must not be there, which files are meant to have it, and why. One line per find,
exit code 1 if there is any.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".proto", ".mako", ".ini"}
UNTRACKED = {".venv", "dist", "site", "__pycache__", ".git"}
GENERATED = ("_pb2.py", "_pb2.pyi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that must not be written in the files below `where`."""

    pattern: str
    where: str
    """Glob over paths from the root."""
    except_in: tuple[str, ...] = ()
    """Ends of the paths that are meant to have it."""
    not_under: tuple[str, ...] = ()
    """Folders that are left alone."""
    because: str


RULES = (
    Rule(
        pattern=r"""["']tinker:""",
        where="packages/*/src/**/*.py",
        except_in=("operations/reference.py",),
        because="checkpoint paths are put together and taken apart in operations/reference.py only",
    ),
    Rule(
        pattern=r"\bparallel_state\b|\bmpu\b",
        where="packages/*/src/**/*.py",
        except_in=("ranks/parallel.py", "ranks/megatron.py"),
        because="only ranks/parallel.py asks Megatron who we are",
    ),
    Rule(
        pattern=r"\.cuda\(",
        where="packages/*/src/**/*.py",
        because="the device is chosen once; write .to(device)",
    ),
    Rule(
        pattern=r"\bpickle\.loads?\(|weights_only=False|allow_pickle=True",
        where="packages/*/src/**/*.py",
        except_in=("groups/torch.py",),  # between ranks of one job, as torch's own collectives do
        because="bytes from a file or a socket are never unpickled without an allow-list",
    ),
    Rule(
        pattern=r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
        where="**/*",
        because="finish it, or say in words what is left out",
    ),
    Rule(
        pattern=r"[^\x00-\x7f]",
        where="**/*",
        not_under=("tests/",),
        because="sources and documents are ASCII; write escapes for other characters",
    ),
)


def files() -> list[Path]:
    """Text files, from the root: those that git tracks, or all of an unpacked archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        paths = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        here = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        paths = [path for path in here if not UNTRACKED.intersection(path.parts)]
    return [path for path in paths if path.suffix in TEXT and not path.name.endswith(GENERATED)]


def finds(path: Path, text: str, rule: Rule) -> Iterator[str]:
    """Every line of one file that breaks one rule, ready to print."""
    name = path.as_posix()
    allowed = name.endswith(rule.except_in) or name.startswith(rule.not_under)
    if allowed or not _matches(path, rule.where):
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.search(rule.pattern, line):
            yield f"{path}:{number}: {match.group()!a}: {rule.because}"


def _matches(path: Path, where: str) -> bool:
    """Does a glob with `**` match the whole path? Python itself has this from 3.13."""
    pattern = re.escape(where).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(pattern, path.as_posix()) is not None


def main() -> int:
    """Print every find."""
    found: list[str] = []
    for path in files():
        if not (ROOT / path).is_file():  # Removed, but not yet committed.
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        for rule in RULES:
            found += finds(path, text, rule)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
