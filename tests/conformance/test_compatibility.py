"""docs/compatibility.md says of every public method of the SDK what becomes of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"


@pytest.mark.parametrize(
    "client",
    [
        tinker.ServiceClient,
        tinker.TrainingClient,
        tinker.SamplingClient,
        tinker.RestClient,
        tinker.AdminClient,
    ],
)
def test_every_public_method_of_the_sdk_is_on_the_page(client):
    _, _, rest = PAGE.read_text("utf-8").partition(f"## {client.__name__}\n")
    listed = set(re.findall(r"^\| `(\w+)` \| (?:works|refused) \|", rest.split("\n## ")[0], re.M))
    public = {
        name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))
    }
    assert listed == public


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_page_is_what_the_sdk_finds():
    script = ROOT / "scripts" / "make_compatibility.py"
    done = subprocess.run([sys.executable, script, "--check"], timeout=200, check=False)
    assert done.returncode == 0
