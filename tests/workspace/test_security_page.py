"""docs/security.md: each claim has a test, and each test is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
CLAIMS = [
    row.split(" | ")
    for row in re.findall(r"^\| (.+) \|$", PAGE.partition("| claim | test |")[2], re.M)
    if not row.startswith("claim")
]


def test_the_page_claims_something():
    assert len(CLAIMS) > 25


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[0][:40])
def test_each_claim_names_tests_that_are_there(claim):
    words, named = claim
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", named)
    assert tests, f"no test for: {words}"
    for file, name in tests:
        source = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.M), f"{file} has no {name}"
