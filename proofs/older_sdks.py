"""Proof of B10: SDKs from the last that spoke JSON to the newest live whole lives against one server.

Each version gets an environment of its own, which `uv` makes in a temporary folder; the package index is asked for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _packages import UV, install
from _proof import Proof, tiny_server

VERSIONS = ("0.24.1", "0.25.0", "0.26.0", "0.38.0")
"""0.24.1 sends passes as JSON; from 0.25 on they are protobuf; from 0.26 on samples carry ids of their sequences."""
LIMIT_S = 240.0
SCRIPT = Path(__file__).with_name("_older_sdk.py")


def environment(folder: Path, version: str) -> Path:
    """The interpreter of a fresh environment with this version."""
    home = folder / version
    python = home / "bin" / "python"
    subprocess.run(
        [UV, "venv", "-q", "--python", sys.executable, str(home)],
        check=True,
        timeout=LIMIT_S,
        capture_output=True,
    )
    install("--python", str(python), f"tinker=={version}")
    return python


def life(python: Path, url: str, key: str) -> dict[str, object]:
    """What one life gave.

    Raises:
        RuntimeError: it ended with an error; the message has its last lines.
    """
    done = subprocess.run(
        [str(python), "-W", "ignore", str(SCRIPT), url, key],
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        env={**os.environ, "TINKER_TELEMETRY": "0"},
    )
    if done.returncode:
        last = " | ".join(done.stderr.splitlines()[-3:])
        raise RuntimeError(f"exit code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    proof = Proof("older_sdks")
    with tempfile.TemporaryDirectory(prefix="lilo-proof-") as folder, tiny_server() as server:
        for version in VERSIONS:
            with proof.part(f"tinker {version}"):
                python = environment(Path(folder), version)
                gave = life(python, server.base_url, server.api_key)
                wanted = {"version": version, "sequences": 2, "warm": True, "cold": True}
                proof.equal(
                    f"tinker {version}: train, forward, sample, save, restore", gave, wanted
                )
    proof.end()


if __name__ == "__main__":
    main()
