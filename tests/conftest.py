"""What every test gets: anyio on asyncio, fixed seeds, one torch thread."""

import os
import random
import sys

# Before torch is imported anywhere, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The engine runs on asyncio; session scope lets wider fixtures be asynchronous too."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test that draws numbers draws the same ones alone and in company."""
    random.seed(0)
    numpy.random.seed(0)
    # Only where a test has brought torch in: importing it takes seconds that most tests need not spend.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
