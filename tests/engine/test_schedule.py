"""Schedule: order, coalescing, lanes and fairness, without a clock."""

import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from lilo_engine.operations.fingerprint import fingerprint
from lilo_engine.operations.ledger import Ledger
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.schedule.coalesce import Budget
from lilo_engine.schedule.lanes import Lanes
from lilo_engine.schedule.order import Order
from lilo_engine.schedule.scheduler import MAX_STEPS, Scheduler


class Queues:
    """Models with waiting operations, and the scheduler over them."""

    def __init__(self, max_tokens=10_000, max_requests=None, workers=2, packs_models=False):
        self.scheduler = Scheduler(
            budget=Budget(
                max_tokens=max_tokens, max_requests=max_requests, packs_models=packs_models
            ),
            lanes=Lanes(publication_workers=workers),
        )
        self.parked = {}
        self.ledgers = {}

    def add(self, *operations):
        for operation in operations:
            model_id = operation.model_id
            if model_id not in self.ledgers:
                self.ledgers[model_id] = Ledger(model_id=model_id, max_queued=10_000)
                self.parked[model_id] = self.ledgers[model_id].sequence
                self.scheduler.add(model_id, self.parked[model_id])
            self.ledgers[model_id].submit(operation, fingerprint(operation), None)

    def next(self):
        plan = self.scheduler.next_plan()
        if plan is None:
            return None
        for entry in plan.entries:
            assert self.parked[entry.operation.model_id].take() is entry
        return plan

    def names(self):
        plan = self.next()
        return plan and [f"{e.operation.model_id}{e.seq_id}" for e in plan.entries]


def test_heads_of_other_models_come_before_consecutive_requests(build):
    queues = Queues()
    queues.add(*[build.forward_backward(m, s) for m in "ab" for s in (1, 2)])
    assert queues.names() == ["a1", "b1", "a2", "b2"]


def test_a_cap_on_requests_is_filled_with_heads_first(build):
    queues = Queues(max_requests=2)
    queues.add(*[build.forward_backward(m, s) for m in "ab" for s in (1, 2)])
    assert queues.names() == ["a1", "b1"]
    assert queues.names() == ["a2", "b2"]


def test_a_cap_of_one_runs_every_request_alone(build):
    queues = Queues(max_requests=1)
    queues.add(*[build.forward_backward(m, s) for m in "ab" for s in (1, 2)])
    assert [queues.names() for _ in range(4)] == [["a1"], ["b1"], ["a2"], ["b2"]]


def test_the_token_budget_lets_smaller_requests_pass_one_that_does_not_fit(build):
    queues = Queues(max_tokens=100)
    queues.add(
        build.forward_backward("a", 1, datums=(build.datum(n=60),)),
        build.forward_backward("b", 1, datums=(build.datum(n=60),)),
        build.forward_backward("c", 1, datums=(build.datum(n=40),)),
    )
    assert queues.names() == ["a1", "c1"]
    assert queues.names() == ["b1"]


@pytest.mark.parametrize("packs_models", [True, False])
def test_a_plan_says_whether_rows_of_several_models_run_together(build, packs_models):
    queues = Queues(packs_models=packs_models)
    queues.add(*[build.forward_backward(m, s) for m in "ab" for s in (1, 2)])
    assert ("share microbatches" in queues.next().reason) == packs_models
    queues.add(*[build.forward_backward("a", s) for s in (3, 4)])
    assert "share microbatches" not in queues.next().reason  # one model's


def test_a_request_over_the_budget_runs_alone(build):
    queues = Queues(max_tokens=100)
    queues.add(
        build.forward_backward("a", 1, datums=(build.datum(n=300),)),
        build.forward_backward("b", 1),
    )
    assert queues.names() == ["a1"]
    assert queues.names() == ["b1"]


@pytest.mark.parametrize(
    "other",
    [
        {"loss": "dro"},
        {"config": {"x": 1.0}},
        {"forward_only": True},
    ],
)
def test_passes_of_another_kind_do_not_join(build, other):
    queues = Queues()
    queues.add(build.forward_backward("a", 1), build.forward_backward("b", 1, **other))
    assert queues.names() == ["a1"]


def test_a_step_ends_what_can_be_coalesced(build):
    queues = Queues()
    queues.add(build.forward_backward("a", 1), build.step("a", 2), build.forward_backward("a", 3))
    assert [queues.names() for _ in range(4)] == [["a1"], ["a2"], ["a3"], None]


def test_steps_of_several_models_are_one_plan_and_of_one_model_never(build):
    queues = Queues()
    queues.add(*[build.step(m, s) for m in "abc" for s in (1, 2)])
    assert queues.names() == ["a1", "b1", "c1"]
    assert queues.names() == ["a2", "b2", "c2"]
    assert queues.names() is None


def test_a_plan_of_steps_is_bounded(build):
    queues = Queues()
    queues.add(*[build.step(f"m{i}", 1) for i in range(MAX_STEPS + 3)])
    assert [len(queues.next().entries) for _ in range(2)] == [MAX_STEPS, 3]


def test_a_gap_holds_back_only_its_own_model(build):
    queues = Queues()
    queues.add(build.forward_backward("a", 2), build.forward_backward("b", 1))
    assert queues.names() == ["b1"]
    assert queues.names() is None


def test_a_second_checkpoint_waits_for_the_first_and_nobody_else_does(build):
    queues = Queues()
    queues.add(build.save("a", 1), build.save("b", 1), build.forward_backward("c", 1))
    assert queues.names() == ["a1"]
    assert queues.names() == ["c1"]
    assert queues.names() is None
    queues.scheduler.lanes.release("checkpoint", ModelId("a"))
    assert queues.names() == ["b1"]


def test_publications_run_side_by_side_but_one_per_model(build):
    queues = Queues(workers=2)
    queues.add(build.publish("a", 1), build.publish("a", 2, "second"))
    queues.add(build.publish("b", 1), build.publish("c", 1))
    assert queues.names() == ["a1"]
    assert queues.names() == ["b1"]
    assert queues.names() is None
    queues.scheduler.lanes.release("publication", ModelId("b"))
    assert queues.names() == ["c1"]
    queues.scheduler.lanes.release("publication", ModelId("a"))
    assert queues.names() == ["a2"]


def test_a_checkpoint_does_not_delay_a_publication(build):
    queues = Queues(workers=1)
    queues.add(build.save("a", 1), build.publish("b", 1))
    assert queues.names() == ["a1"]
    assert queues.names() == ["b1"]


def test_a_load_waits_for_its_own_models_save(build):
    queues = Queues()
    ref = CheckpointRef(run_id="a", kind="weights", name="state")
    queues.add(build.save("a", 1), build.load("a", 2, ref))
    assert queues.names() == ["a1"]
    assert queues.names() is None
    queues.scheduler.lanes.release("checkpoint", ModelId("a"))
    assert queues.names() == ["a2"]


def test_every_plan_says_why(build):
    queues = Queues()
    queues.add(build.forward_backward("a", 1), build.forward_backward("b", 1))
    reason = queues.next().reason
    assert "turn of a" in reason
    assert "2 passes of 2 models" in reason


@pytest.mark.parametrize("budget_tokens", [64, 200, 1000])
def test_equal_work_makes_equal_progress_however_it_is_cut(build, budget_tokens):
    queues = Queues(max_tokens=budget_tokens)
    total = 64 * 200
    for model, size in [("a", 64), ("b", 16), ("c", 4)]:
        for number in range(1, total // size + 1):
            datums = (build.datum(n=size),)
            queues.add(build.forward_backward(model, number, datums=datums))
    served = dict.fromkeys("abc", 0)
    while max(served.values()) < total // 2:
        for entry in queues.next().entries:
            served[entry.operation.model_id] += entry.tokens
    assert max(served.values()) < 1.25 * min(served.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3)), min_size=1, max_size=30),
        min_size=2,
        max_size=9,
    ),
    st.data(),
)
def test_nobody_ready_is_passed_over_more_often_than_there_are_models(work, data):
    """Models with requests of any size, that pause between them for any number of turns."""
    order = Order()
    names = [ModelId(f"m{i}") for i in range(len(work))]
    for name in names:
        order.add(name)
    queues = {name: list(items) for name, items in zip(names, work, strict=True)}
    passed = dict.fromkeys(names, 0)
    resting = dict.fromkeys(names, 0)
    while any(queues.values()):
        ready = [name for name in names if queues[name] and resting[name] == 0]
        for name in names:
            if name not in ready:
                passed[name] = 0
            resting[name] = max(0, resting[name] - 1)
        if not ready:
            continue
        for name in names:
            order.enter(name) if name in ready else order.leave(name)
        turn = order.choose().model_id
        joins = data.draw(st.sets(st.sampled_from(ready), max_size=2)) | {turn}
        order.settle({name: queues[name][0][0] for name in joins})
        assert all(order.passed_over(name) == passed[name] + 1 for name in set(ready) - joins)
        for name in ready:
            passed[name] = 0 if name in joins else passed[name] + 1
            assert passed[name] <= len(names)
        for name in joins:
            resting[name] = queues[name].pop(0)[1]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 32), st.integers(1, 700))
def test_clients_with_equal_requests_stay_within_a_quarter(num_models, tokens):
    order = Order()
    names = [ModelId(f"m{i}") for i in range(num_models)]
    for name in names:
        order.add(name)
    served = dict.fromkeys(names, 0)
    for _ in range(num_models * 20):
        for name in names:
            order.enter(name)
        turn = order.choose().model_id
        order.settle({turn: tokens})
        served[turn] += tokens
    assert max(served.values()) < 1.25 * min(served.values())


@pytest.mark.parametrize("spread", ["one model", "every request its own model"])
def test_a_pass_does_not_cost_more_with_more_parked_bytes(build, spread):
    """In calls, which are the same on a machine of any speed."""

    def calls(num_datums):
        queues = Queues(max_tokens=64)
        datums = tuple(build.datum(n=64 // num_datums) for _ in range(num_datums))
        for i in range(128):
            model, number = ("m", i + 1) if spread == "one model" else (f"m{i}", 1)
            queues.add(build.forward_backward(model, number, datums=datums))
        return [_calls_of(queues.next) for _ in range(32)]

    first, *later = calls(32)
    first_small, *later_small = calls(1)
    assert first < 1.1 * first_small
    assert max(later) < 1.1 * min(later_small)
    assert max(later) <= first  # which looks once at each request that came


def _calls_of(work):
    """How many functions `work` calls, of Python and of C: what it costs on a machine of any speed."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
