"""The README: every promise is numbered, and names tests that are there."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent.parent / "packages" / "lilo-volume" / "README.md"
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_promise_is_numbered_and_names_tests_that_are_there():
    rows = ROW.findall(README.read_text("utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 20
    for number, _, cell in rows:
        tests = TEST.findall(cell)
        assert ", ".join(f"`{file}::{name}`" for file, name in tests) == cell, number
        for file, name in tests:
            tree = ast.parse((HERE / file).read_text("utf-8"))
            there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in there, f"promise {number}: {file} has no {name}"


def test_the_example_of_two_nodes_is_ten_lines():
    text = README.read_text("utf-8")
    script = text.partition("cat > node.py << 'END'\n")[2].partition("END\n")[0]
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
