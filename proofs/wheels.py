"""Wheels: four packages in four new environments, four READMEs run as written, and one release to an index and back."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import release  # noqa: E402
from _proof import Proof, medians_of  # noqa: E402

from tests.workspace.environments import (  # noqa: E402
    Environment,
    build_all,
    install,
    run_readme,
)

NAMES = ("lilo-volume", "lilo-definitions", "lilo-engine", "lilo-miles-backend")
HELP_LIMIT_S = 0.3


def main() -> None:
    """Measure."""
    proof = Proof("wheels")
    with tempfile.TemporaryDirectory(prefix="lilo-wheels-") as temporary:
        folder = Path(temporary)
        dist = build_all(ROOT, folder / "dist")
        kinds = sorted({path.suffix for path in dist.iterdir() if path.suffix in (".whl", ".gz")})
        proof.equal("files that were built", len(list(dist.glob("lilo_*"))), 8)
        proof.equal("kinds of them", kinds, [".gz", ".whl"])
        for name in NAMES:
            with proof.part(f"{name} in a new environment"):
                place = folder / name
                (place / "work").mkdir(parents=True)
                check(proof, name, install(place, dist, name), place / "work")
    with proof.part("a release of lilo-volume"):
        done = release.rehearse(ROOT, "lilo-volume")
        proof.equal("a release reached the index byte for byte", done["same_bytes"], True)
    proof.end()


def check(proof: Proof, name: str, environment: Environment, work: Path) -> None:
    """What one package must do alone."""
    blocks = run_readme(ROOT / "packages" / name / "README.md", environment, work)
    proof.at_least(f"{name}: blocks of the README run as written", blocks, 1)
    if name == "lilo-volume":
        proof.equal(f"{name}: what it pulls in", sorted(environment.installed() - {name}), [])
    if name == "lilo-engine":
        environment.compile()
        wall, busy = medians_of([str(environment.bin / "lilo"), "--help"])
        proof.at_most(f"lilo --help, s by the clock (processor {busy:.2f} s)", wall, HELP_LIMIT_S)


if __name__ == "__main__":
    main()
