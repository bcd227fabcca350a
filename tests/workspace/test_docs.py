"""Every file and folder that a document names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT_FORMS = {
    "engine/": "packages/lilo-engine/src/lilo_engine/",
    "backend/": "packages/lilo-miles-backend/src/lilo_miles_backend/",
    "volume/": "packages/lilo-volume/src/lilo_volume/",
    "definitions/": "packages/lilo-definitions/src/lilo_definitions/",
}
"""As docs/architecture.md introduces them."""
DOCUMENTS = [
    "README.md",
    "benchmarks/README.md",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def places_named_in(text: str) -> set[str]:
    """Paths in code spans that start at a folder of ours, in full."""
    spans = re.findall(r"`([a-z][\w./-]+/[\w./-]*)`", text)
    full = set()
    for span in spans:
        short = next((form for form in SHORT_FORMS if span.startswith(form) and span != form), None)
        full.add(SHORT_FORMS[short] + span.removeprefix(short) if short else span)
    starts = ("packages/", "tests/", "proofs/", "benchmarks/", "examples/", "scripts/", "docs/")
    return {path for path in full if path.startswith(starts)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_place_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text("utf-8")
    missing = sorted(path for path in places_named_in(text) if not (ROOT / path).exists())
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_of_a_document_leads_somewhere(document):
    text = (ROOT / document).read_text("utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    missing = [
        t for t in targets if "://" not in t and not (ROOT / document).parent.joinpath(t).exists()
    ]
    assert missing == []


def test_the_architecture_names_the_files_of_every_step():
    names = places_named_in((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    assert sum(name.endswith(".py") for name in names) > 50


def test_the_example_inside_the_package_is_the_one_among_the_examples():
    inside = ROOT / "packages/lilo-engine/src/lilo_engine/demo/rl_arithmetic.py"
    assert (ROOT / "examples/rl_arithmetic.py").read_bytes() == inside.read_bytes()
