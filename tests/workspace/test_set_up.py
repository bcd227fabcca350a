"""The entry points people type: make, the set-up script, the word check."""

import os
import shutil
import subprocess
import sys


def test_a_python_that_is_too_old_is_named(root, tmp_path):
    # A copy, so that the set-up of this checkout is left alone.
    for name in ("pyproject.toml", "uv.lock", "scripts/setup.sh", "packages/x/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        source = root / name
        shutil.copy(source if source.is_file() else root / "pyproject.toml", tmp_path / name)
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts" / "setup.sh"],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert str(old) in done.stderr
    assert "3.11" in done.stderr


def test_make_prove_lists_every_proof_with_a_line(root):
    done = subprocess.run(
        [sys.executable, root / "scripts" / "prove.py"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    proofs = [path.stem for path in (root / "proofs").glob("*.py") if path.stem[0] != "_"]
    lines = done.stdout.splitlines()
    assert len(lines) == len(proofs)
    assert all("(no docstring)" not in line for line in lines)


def test_a_proof_that_does_not_exist_is_refused_with_those_there_are(root):
    done = subprocess.run(
        [sys.executable, root / "scripts" / "prove.py", "nonsense"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
