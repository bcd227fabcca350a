"""The vectors: what a volume with a view per container shows to whom, in one process and across several."""

import pytest
from lilo_volume.testing.emulator import VECTORS, InProcess, OneProcessEach, run_vector


def test_there_are_34_vectors():
    assert [vector.name for vector in VECTORS] == [f"V{number:02}" for number in range(1, 35)]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_a_vector_holds_in_one_process(vector, tmp_path):
    with InProcess(tmp_path, vector.modes) as driver:
        run_vector(vector, driver)


@pytest.fixture(scope="module")
def processes():
    with OneProcessEach() as driver:
        yield driver


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_a_vector_holds_across_processes(vector, tmp_path, processes):
    run_vector(vector, processes.use(tmp_path, vector.modes))
