"""What importing a package pulls in, seen from a fresh interpreter."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "megatron", "ray", "transformers", "numba", "triton"}


def imported_by(statement: str) -> set[str]:
    """Top-level names of the modules that a statement brings into a fresh interpreter."""
    program = (
        "import sys, json\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_lilo_volume_needs_the_standard_library_only():
    strangers = imported_by("import lilo_volume") - set(sys.stdlib_module_names)
    assert strangers == {"lilo_volume"}


@pytest.mark.parametrize(
    "statement",
    [
        "import lilo_definitions; lilo_definitions.get('tiny')",
        "import lilo_engine",
        "import lilo_engine.app",
        "import lilo_engine.cli",
        "import lilo_engine.cli.doctor",
        "import lilo_engine.commands.serve_backend",
        "import lilo_engine.sampling.manager",
    ],
)
def test_everything_but_the_backend_imports_without_torch(statement):
    assert not imported_by(statement) & HEAVY


def test_the_engine_does_not_import_the_backend():
    assert "lilo_miles_backend" not in imported_by("import lilo_engine.app, lilo_engine.cli")
