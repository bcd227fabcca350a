"""Gathering: a pass waits a moment for those that can share it, and for nobody else."""

import anyio
import pytest
from lilo_engine.operations.fingerprint import fingerprint
from lilo_engine.operations.operation import ModelId, OptimStep
from lilo_engine.operations.result import Passed, Stepped
from lilo_engine.schedule.gathering import GATHER_S, PROMPT_S
from lilo_engine.work import Work


class Clients:
    """Models that are ready, on a trainer that takes no time; the test moves the clock."""

    def __init__(self, build, definition, *names):
        self.build = build
        self.now_s = 100.0
        self.work = Work(definition, suspend_idle_s=300.0, clock=lambda: self.now_s)
        self.numbers = dict.fromkeys(names, 0)
        for name in names:
            request = build.model(name)
            self.work.ready(self.work.open_model(request, fingerprint(request)))

    def send(self, make, *names):
        for name in names:
            self.numbers[name] += 1
            operation = make(name, self.numbers[name])
            model = self.work.roster.resident(ModelId(name))
            self.work.submit(model, operation, fingerprint(operation), None)

    def send_pass(self, *names):
        self.send(self.build.forward_backward, *names)

    def send_step(self, *names):
        self.send(self.build.step, *names)

    def run(self):
        """Carry out the next plan; its models."""
        plan = self.work.next_step()
        if plan is None:
            return None
        models = []
        for entry in plan.entries:
            model = self.work.roster.resident(entry.operation.model_id)
            stepped = isinstance(entry.operation, OptimStep)
            result = Stepped(metrics={}) if stepped else Passed(logprobs=(), metrics={})
            self.work.complete(model, entry, result)
            self.work.settled(model)
            models.append(model.model_id)
        return models

    def train(self, *names, thinking_s=0.0):
        """A step of each; their clients come back after a while with nothing but a forward pass."""
        self.send_pass(*names)
        assert self.run() == list(names)
        self.send_step(*names)
        assert self.run() == list(names)
        self.now_s += thinking_s


@pytest.fixture
def packing(tiny):
    return tiny.derive(trainer={"pack_models": True})


@pytest.fixture
def prompt(build, packing):
    """Two clients whose steps have just ended, and who came back at once the last time."""
    clients = Clients(build, packing, "a", "b")
    clients.train("a", "b")
    clients.train("a", "b")
    return clients


def test_a_pass_waits_for_a_model_whose_step_has_just_ended(prompt):
    prompt.send_pass("a")
    assert prompt.run() is None
    prompt.send_pass("b")
    assert prompt.run() == ["a", "b"]


def test_it_waits_a_moment_only(prompt):
    prompt.send_pass("a")
    assert prompt.run() is None
    prompt.now_s += GATHER_S
    assert prompt.run() == ["a"]


@pytest.mark.anyio
async def test_it_waits_no_longer_where_the_moment_ends_before_the_wait_begins(prompt):
    prompt.send_pass("a")
    assert prompt.run() is None
    prompt.now_s += GATHER_S
    with anyio.fail_after(5):
        await prompt.work.wait()
    assert prompt.run() == ["a"]


def test_steps_are_done_meanwhile(build, packing):
    clients = Clients(build, packing, "a", "b", "c")
    clients.train("a", "b")
    clients.send_pass("a", "b", "c")
    assert set(clients.run()) == {"a", "b", "c"}
    clients.send_step("a", "b")
    assert clients.run() == ["a", "b"]
    clients.send_pass("a")
    clients.send_step("c")
    assert clients.run() == ["c"]
    assert clients.run() is None


def test_nobody_waits_for_a_client_that_took_its_time(build, packing):
    clients = Clients(build, packing, "a", "b")
    clients.train("a", "b", thinking_s=2 * PROMPT_S)
    clients.train("a", "b")
    clients.send_pass("a")
    assert clients.run() == ["a"]


def test_nobody_waits_for_a_model_that_ended(prompt):
    gone = prompt.work.roster.resident(ModelId("b"))
    prompt.work.end(gone, "its session ended", gone.gone_with("its session ended"))
    prompt.send_pass("a")
    assert prompt.run() == ["a"]


def test_a_client_alone_never_waits(build, packing):
    clients = Clients(build, packing, "a", "b")
    for _ in range(3):
        clients.train("a")


def test_nobody_waits_where_models_share_no_passes(build, tiny):
    clients = Clients(build, tiny, "a", "b")
    clients.train("a", "b")
    clients.train("a", "b")
    clients.send_pass("a")
    assert clients.run() == ["a"]
