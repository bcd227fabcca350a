"""What holds in one process holds when front and engine are apart: the same tests, over the fixtures of this folder."""

# ruff: noqa: F403 - tests are found by their names

from tests.conformance.test_console import *
from tests.conformance.test_sdk import *
from tests.conformance.test_sharing import *
from tests.conformance.test_ten_facts import *
