"""Simulation: the real scheduler under many synthetic clients, by a clock of its own."""

import time

import pytest
from lilo_engine.simulate.plot import svg
from lilo_engine.simulate.simulation import Simulation
from lilo_engine.simulate.workload import Workload, scripts

WANTED = Workload(clients=200, shortest_tokens=512, work_tokens=32768)


@pytest.fixture(scope="module")
def two_hundred(tiny):
    return Simulation(workload=WANTED, limits=tiny.limits).run()


def test_every_client_does_all_its_work(two_hundred):
    assert set(two_hundred.ends_s) == set(range(200))
    figures = two_hundred.figures()
    steps = [step for script in scripts(WANTED) for step in script.steps]
    assert figures.operations == sum(
        len(step.passes) + 1 + (step.save is not None) for step in steps
    )
    assert all(sum(sum(s.passes) for s in c.steps) == WANTED.work_tokens for c in scripts(WANTED))


def test_equal_work_in_requests_of_any_length_makes_equal_progress(two_hundred):
    figures = two_hundred.figures()
    assert figures.progress_ratio < 1.25
    assert figures.last_end_s < 1.1 * figures.first_end_s


def test_nobody_is_passed_over_more_often_than_there_are_models(two_hundred):
    figures = two_hundred.figures()
    assert 0 < figures.bypass <= figures.bypass_bound == 200


def test_commands_that_leave_others_waiting_are_full(two_hundred):
    assert two_hundred.figures().fill > 0.97


def test_the_trainer_is_never_idle_while_work_waits(two_hundred):
    assert two_hundred.figures().lane_use["gpu"] > 0.99


def test_a_cap_of_one_still_bounds_the_bypass(limits):
    definition = limits(max_forward_backward_batch=1)
    workload = Workload(clients=50, work_tokens=8192)
    figures = Simulation(workload=workload, limits=definition.limits).run().figures()
    assert figures.bypass <= 50


def test_equal_workloads_give_equal_runs(tiny):
    def once(seed):
        workload = Workload(clients=20, work_tokens=8192, seed=seed)
        return Simulation(workload=workload, limits=tiny.limits).run().figures()

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_the_picture_names_its_curves(two_hundred):
    picture = svg(two_hundred, two_hundred.figures())
    assert picture.startswith("<svg")
    for name in ("fastest client", "slowest client", "forward_backward", "optim_step", "save"):
        assert f">{name}</text>" in picture


def test_a_plan_does_not_cost_more_with_more_models(tiny):
    """Processor time per operation of 2,000 clients stays within three times that of 100."""

    def cost(clients):
        workload = Workload(clients=clients, work_tokens=8192, longest_tokens=512)
        simulation = Simulation(workload=workload, limits=tiny.limits)
        started = time.process_time()
        figures = simulation.run().figures()
        return (time.process_time() - started) / figures.operations

    cost(20)
    assert cost(2000) < 3 * cost(100)
