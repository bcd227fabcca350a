"""What every test gets: anyio on asyncio, fixed seeds, one torch thread."""

import os
import random
import sys
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a program that a test runs in this process sets for its children is not set for the tests after it."""
    before = dict(os.environ)
    yield
    for name in (os.environ.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server."""
    # Not above: tests of one package run where no other, and no client of a database, is installed.
    from tests.control.postgres import postgres_server, why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with postgres_server() as url:
        yield url


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    """The address of a database of the test's own, empty at first."""
    from tests.control.postgres import database

    with database(postgres) as url:
        yield url
