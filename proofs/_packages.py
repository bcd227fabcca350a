"""Packages that a proof needs beside those of this environment: fetched by `uv`. Not a proof."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

UV = str(Path(sys.executable).with_name("uv"))
TRIES, PAUSE_S = 4, 5.0
"""An index that does not answer for some seconds is no finding about Lilo."""
LIMIT_S = 240.0
"""For one try."""


def install(*arguments: str) -> None:
    """`uv pip install` with these arguments.

    Raises:
        RuntimeError: no try went well; the message has the last lines of the last one.
    """
    said = ""
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE_S * number)
        try:
            done = subprocess.run(
                [UV, "pip", "install", "--quiet", *arguments],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            said = f"no end within {LIMIT_S:g} s"
            continue
        if done.returncode == 0:
            return
        said = " | ".join(done.stderr.splitlines()[-4:])
    raise RuntimeError(f"packages could not be fetched in {TRIES} tries: {said}")
