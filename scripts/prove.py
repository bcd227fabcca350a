"""Lists the proofs, or runs one: `python scripts/prove.py [NAME]`.

A proof is `proofs/NAME.py`: it measures, prints one JSON object per figure, and exits with 0 only if all of them hold.
"""

import ast
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROOFS = ROOT / "proofs"


def names() -> list[str]:
    """The proofs there are; a leading underscore marks what they share."""
    stems = sorted(path.stem for path in PROOFS.glob("*.py") if not path.stem.startswith("_"))
    return [stem.replace("_", "-") for stem in stems]


def file_of(name: str) -> Path:
    """Where a proof is: a module's name has no hyphens."""
    return PROOFS / f"{name.replace('-', '_')}.py"


def first_line(name: str) -> str:
    """The first line of a proof's docstring, read without running it."""
    tree = ast.parse(file_of(name).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "(no docstring)").splitlines()[0]


def main() -> int:
    """List without an argument; with one, become that proof."""
    known = names()
    if len(sys.argv) == 1:
        width = max(map(len, known), default=0)
        for name in known:
            print(f"make prove-{name:<{width}}  {first_line(name)}")
        return 0
    name = sys.argv[1].replace("_", "-")
    if name not in known:
        print(f"there is no proof {name!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    # In place of this process, so that whoever ends it ends the proof.
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, str(file_of(name)), *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
