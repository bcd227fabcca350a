"""Serial: what clients sent, and a trainer that runs one model's operations alone, one by one: the reference of
`test_interleavings.py`.
"""

import itertools

from lilo_definitions import get
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.errors import BackendLost, Gone, Unavailable
from lilo_engine.operations.operation import ForwardBackward, ModelId, OptimStep, SaveState
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Complete, Failed

from tests.engine.conftest import Build

BUILD = Build()
TINY = get("tiny").derive(lora={"slots": 3})


class Client:
    """One model and everything that was sent for it."""

    def __init__(self, name, creation):
        self.name = name
        self.creation = creation
        self.sent = {}
        """Number -> (operation, request id)."""
        self.ended = False
        self.seen = set()
        """Numbers whose result was fetched, and so need not be kept for ever."""
        self.states = None
        """What became of all that was sent, for a client of an earlier engine."""

    def unsent(self, skip):
        return next(
            itertools.islice((n for n in itertools.count(1) if n not in self.sent), skip, None)
        )


def operation(kind, name, number):
    match kind:
        case "pass":
            return BUILD.forward_backward(name, number, datums=(BUILD.datum(n=number % 5 + 1),))
        case "forward":
            return BUILD.forward_backward(name, number, forward_only=True)
        case "bad pass":
            return BUILD.forward_backward(name, number, loss="nonsense")
        case "step":
            return BUILD.step(name, number)
        case "save":
            return BUILD.save(name, number, name=f"state-{number}")
        case "load":
            return BUILD.load(name, number, CheckpointRef(run_id=name, kind="weights", name="none"))
        case _:
            return BUILD.publish(name, number, name=f"snapshot-{number}")


def check_order(logs):
    """No pass ran twice, and those of one model ran in order."""
    ran = [
        name
        for log in logs
        for entry in log
        if entry[0] == "forward_backward"
        for name in entry[1:]
    ]
    assert len(ran) == len(set(ran)), "an operation ran twice"
    last = {}
    for name in ran:
        model, number = name.split(":")
        assert last.get(model, 0) < int(number), f"{name} ran after {last[model]}"
        last[model] = int(number)


def check_alone(client, states, root):
    """The answers of a model are those of a trainer that runs its operations one by one."""
    alone = MemoryBackend(BackendConfig(definition=TINY, checkpoints_root=str(root), epoch=1))
    model_id = ModelId(client.name)
    alone.create_adapter(model_id, BUILD.lora())
    passes, spoiled = 0, False
    for number in sorted(states):
        asked, state = client.sent[number][0], states[number]
        if state is None or (
            isinstance(state, Failed) and isinstance(state.error, BackendLost | Gone | Unavailable)
        ):
            return
        done = isinstance(state, Complete)
        match asked:
            case ForwardBackward():
                if done:
                    assert state.result.metrics == _pass(alone, asked).metrics, asked
                    passes += not asked.forward_only
                else:
                    spoiled = spoiled or not asked.forward_only
            case OptimStep():
                if not done:
                    # Refused for its window, or made to fail: the window begins anew either way.
                    alone.drop_gradients(model_id)
                else:
                    assert passes
                    assert not spoiled
                    assert state.result.metrics == alone.optim_step(model_id, asked.params)
                passes, spoiled = 0, False
            case SaveState() | _:
                pass


def _pass(backend, asked):
    item = WorkItem(operation_id="alone", model_id=asked.model_id, datums=asked.datums)
    batch = Batch(
        loss=asked.loss, config=asked.loss_config, forward_only=asked.forward_only, items=(item,)
    )
    (output,) = backend.forward_backward(batch)
    return output
