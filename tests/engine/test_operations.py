"""Operations: what is refused before it can touch a device, and what makes two requests the same."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lilo_engine.errors import Gone, InvalidRequest, NotFound, Saturated
from lilo_engine.operations import ledger as ledgers
from lilo_engine.operations import roster as rosters
from lilo_engine.operations.fingerprint import fingerprint
from lilo_engine.operations.ledger import Ledger
from lilo_engine.operations.lora_rules import honoured
from lilo_engine.operations.losses import LOSSES
from lilo_engine.operations.operation import ModelId, Refused
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Passed, Stepped
from lilo_engine.operations.roster import Model, Roster
from lilo_engine.operations.sequence import Sequence
from lilo_engine.operations.tensor import Tensor
from lilo_engine.operations.validate import check, check_model, check_seq_id
from lilo_engine.operations.window import Window


def inputs_of(build, loss, n=4):
    return {name: build.floats([0.5] * n) for name in LOSSES[loss].required}


@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_takes_its_inputs(build, tiny, loss):
    datum = build.datum(**inputs_of(build, loss))
    check(build.forward_backward("m", 1, datums=(datum,), loss=loss), tiny)


def test_cross_entropy_takes_several_targets_per_position(build, tiny):
    datum = build.datum(
        target_tokens=Tensor.of(np.zeros((4, 3)), "int64"),
        weights=Tensor.of(np.ones((4, 3)), "float32"),
    )
    check(build.forward_backward("m", 1, datums=(datum,)), tiny)


def test_weights_may_have_any_sign(build, tiny):
    datum = build.datum(weights=build.floats([-1.0, 0.0, 2.5, 1e-30]))
    check(build.forward_backward("m", 1, datums=(datum,)), tiny)


def test_clip_thresholds_may_be_given_per_token(build, tiny):
    datum = build.datum(
        **inputs_of(build, "ppo"),
        clip_low_threshold=build.floats([0.8] * 4),
        clip_high_threshold=build.floats([1.2] * 4),
    )
    check(build.forward_backward("m", 1, datums=(datum,), loss="ppo"), tiny)


BAD_DATUMS = {
    "a target at the vocabulary's end": lambda b: b.datum(
        target_tokens=Tensor.of([0, 1, 2, 260], "int64")
    ),
    "a negative target": lambda b: b.datum(target_tokens=Tensor.of([0, -1, 2, 3], "int64")),
    "no target": lambda b: dataclasses.replace(b.datum(), loss_inputs={}),
    "no token": lambda b: b.datum(n=0),
    "more tokens than the context": lambda b: b.datum(n=1025),
    "short weights": lambda b: b.datum(weights=b.floats([1.0] * 3)),
    "weights of another shape": lambda b: b.datum(weights=Tensor.of(np.ones((4, 1)), "float32")),
    "a weight that is not a number": lambda b: b.datum(weights=b.floats([1, 2, np.nan, 3])),
    "an infinite weight": lambda b: b.datum(weights=b.floats([1, 2, np.inf, 3])),
    "integer weights": lambda b: b.datum(weights=Tensor.of([1] * 4, "int64")),
    "an unknown input": lambda b: b.datum(mask=b.floats([1.0] * 4)),
    "targets of another dtype": lambda b: b.datum(target_tokens=Tensor.of([1] * 4, "int32")),
    "targets with three axes": lambda b: b.datum(
        target_tokens=Tensor.of(np.zeros((4, 1, 1)), "int64")
    ),
    "targets with no column": lambda b: b.datum(target_tokens=Tensor.of(np.zeros((4, 0)), "int64")),
    "tokens of two axes": lambda b: dataclasses.replace(
        b.datum(), tokens=Tensor.of(np.zeros((4, 1)), "int32")
    ),
    "a token beyond the vocabulary": lambda b: dataclasses.replace(
        b.datum(), tokens=Tensor.of([0, 1, 2, 999], "int32")
    ),
}


@pytest.mark.parametrize("name", list(BAD_DATUMS))
def test_a_bad_datum_is_refused_with_its_index(build, tiny, name):
    datums = (build.datum(), BAD_DATUMS[name](build))
    with pytest.raises(InvalidRequest, match="datum 1"):
        check(build.forward_backward("m", 1, datums=datums), tiny)


def test_a_pass_without_datums_is_refused(build, tiny):
    with pytest.raises(InvalidRequest):
        check(build.forward_backward("m", 1, datums=()), tiny)


def test_an_unknown_loss_is_refused_naming_those_there_are(build, tiny):
    with pytest.raises(InvalidRequest) as caught:
        check(build.forward_backward("m", 1, loss="stable_reinforce"), tiny)
    assert all(loss in caught.value.message for loss in LOSSES)


@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if loss.required])
def test_a_missing_input_is_refused_by_its_name(build, tiny, loss):
    with pytest.raises(InvalidRequest, match=LOSSES[loss].required[0]):
        check(build.forward_backward("m", 1, loss=loss), tiny)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("cross_entropy", {"beta": 0.1}),
        ("ppo", {"clip_low": 0.8}),
        ("ppo", {"clip_low_threshold": "0.8"}),
        ("ppo", {"clip_low_threshold": float("nan")}),
        ("ppo", {"clip_low_threshold": 1.3, "clip_high_threshold": 1.2}),
        ("dro", {"beta": -1.0}),
    ],
)
def test_a_bad_setting_of_a_loss_is_refused(build, tiny, loss, config):
    datum = build.datum(**inputs_of(build, loss))
    with pytest.raises(InvalidRequest):
        check(build.forward_backward("m", 1, datums=(datum,), loss=loss, config=config), tiny)


@pytest.mark.parametrize(
    "fields",
    [
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": float("inf")},
        {"grad_clip_norm": -1.0},
    ],
)
def test_bad_adam_parameters_are_refused(build, tiny, fields):
    with pytest.raises(InvalidRequest):
        check(build.step("m", 1, dataclasses.replace(build.adam, **fields)), tiny)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_rank": 0},
        {"lora_rank": 33},
        {"alpha": 0.0},
        {"train_attn": False, "train_mlp": False, "train_unembed": False},
    ],
)
def test_an_impossible_adapter_is_refused(build, tiny, fields):
    with pytest.raises(InvalidRequest):
        check_model(build.model("m", lora=build.lora(**fields)), tiny)


def test_a_head_that_the_definition_lacks_is_left_out_and_other_groups_are_refused(build, tiny):
    attention = tiny.derive(lora={"targets": ("attn",)})
    asked = build.lora(train_attn=True, train_mlp=False, train_unembed=True)
    check_model(build.model("m", lora=asked), attention)
    assert honoured(asked, attention) == dataclasses.replace(asked, train_unembed=False)
    for flags in ({"train_mlp": True}, {"train_attn": False}):
        with pytest.raises(InvalidRequest):
            check_model(build.model("m", lora=dataclasses.replace(asked, **flags)), attention)


def test_an_unknown_base_model_is_refused_by_name(build, tiny):
    with pytest.raises(InvalidRequest, match="llama"):
        check_model(build.model("m", base_model="llama"), tiny)


def test_only_training_checkpoints_can_be_loaded(build, tiny):
    source = CheckpointRef(run_id="r", kind="sampler_weights", name="a")
    with pytest.raises(InvalidRequest):
        check(build.load("m", 1, source), tiny)
    with pytest.raises(InvalidRequest):
        check_model(build.model("m", source=source), tiny)


@pytest.mark.parametrize("seq_id", [0, -1, True, 1.0, "1", None])
def test_numbers_start_at_one(seq_id):
    with pytest.raises(InvalidRequest):
        check_seq_id(seq_id)


def test_equal_payloads_have_equal_fingerprints_whatever_form_numbers_came_in(build):
    one = build.forward_backward("m", 1, config={"a": 1, "b": 0.5})
    two = build.forward_backward("m", 1, config={"b": 0.5, "a": 1.0})
    assert fingerprint(one) == fingerprint(two)


def test_every_part_of_a_payload_counts_in_its_fingerprint(build):
    one = build.forward_backward("m", 1)
    others = [
        build.forward_backward("m", 2),
        build.forward_backward("n", 1),
        build.forward_backward("m", 1, forward_only=True),
        build.forward_backward("m", 1, loss="ppo"),
        build.forward_backward("m", 1, config={"x": 1.0}),
        build.forward_backward("m", 1, datums=(build.datum(start=1), build.datum(start=1))),
        build.forward_backward("m", 1, datums=(build.datum(start=2),)),
        build.step("m", 1),
    ]
    assert len({fingerprint(operation) for operation in [one, *others]}) == len(others) + 1


@given(st.permutations(range(1, 12)))
def test_any_order_of_arrival_gives_one_order_of_execution(order):
    sequence = Sequence()
    taken = []
    for number in order:
        sequence.park(number, number)
        while sequence.peek() is not None:
            taken.append(sequence.take())
    assert taken == list(range(1, 12))


class LedgerMachine(RuleBasedStateMachine):
    """A client that sends numbers in any order, retries, and reads; the ledger runs them in order, once."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(model_id=ModelId("m"), max_queued=1000)
        self.sent = {}
        self.ran = []

    def operation(self, number, verb):
        return Refused(
            model_id=ModelId("m"), seq_id=number, verb=verb, error=InvalidRequest("refused")
        )

    @rule(number=st.integers(1, 12), verb=st.sampled_from(["a", "b"]))
    def submit(self, number, verb):
        operation = self.operation(number, verb)
        mark = fingerprint(operation)
        if number in self.sent and self.sent[number] != verb:
            with pytest.raises(InvalidRequest):
                self.ledger.known(number, mark)
            return
        known = self.ledger.known(number, mark)
        assert (known is None) == (number not in self.sent)
        if known is None:
            entry = self.ledger.submit(operation, mark, None)
            self.sent[number] = verb
            assert entry.request_id == f"m:{number}"

    @precondition(lambda self: self.ledger.sequence.peek() is not None)
    @rule()
    def run_next(self):
        entry = self.ledger.sequence.take()
        self.ran.append(entry.seq_id)
        self.ledger.complete(entry, Stepped(metrics={}))

    @precondition(lambda self: self.ran)
    @rule(data=st.data())
    def fetch(self, data):
        entry = self.ledger.find(data.draw(st.sampled_from(self.ran)))
        self.ledger.fetch(entry)
        assert entry.state is not None

    @invariant()
    def numbers_run_in_order_without_gaps(self):
        assert self.ran == list(range(1, len(self.ran) + 1))

    @invariant()
    def a_gap_is_named(self):
        waiting = sorted(set(self.sent) - set(self.ran))
        nxt = len(self.ran) + 1
        assert self.ledger.sequence.missing() == (nxt if waiting and waiting[0] != nxt else None)


TestLedger = LedgerMachine.TestCase


def a_ledger(max_queued=10):
    return Ledger(model_id=ModelId("m"), max_queued=max_queued)


def submit(ledger, operation):
    return ledger.submit(operation, fingerprint(operation), None)


def test_results_that_were_fetched_are_bounded_and_then_gone(build, monkeypatch):
    monkeypatch.setattr(ledgers, "KEPT_FETCHED", 3)
    ledger = a_ledger()
    for number in range(1, 7):
        submit(ledger, build.step("m", number))
        entry = ledger.sequence.take()
        ledger.complete(entry, Stepped(metrics={}))
        ledger.fetch(entry)
    assert ledger.find(6).state is not None
    with pytest.raises(Gone):
        ledger.find(1)
    with pytest.raises(InvalidRequest):
        ledger.known(1, fingerprint(build.step("m", 1)))


def test_results_that_were_fetched_are_bounded_in_bytes_and_the_newest_stays(build, monkeypatch):
    monkeypatch.setattr(ledgers, "MAX_FETCHED_BYTES", 100)
    ledger = a_ledger()
    for number, size in ((1, 15), (2, 15), (3, 500)):
        submit(ledger, build.step("m", number))
        passed = Passed(logprobs=(Tensor.of([0.0] * size, "float32"),), metrics={})
        ledger.complete(ledger.sequence.take(), passed)
    for number in (1, 2, 3):
        ledger.fetch(ledger.find(number))
    assert ledger.find(3).state is not None
    for number in (1, 2):
        with pytest.raises(Gone):
            ledger.find(number)


def test_results_that_nobody_fetched_stay(build, monkeypatch):
    monkeypatch.setattr(ledgers, "KEPT_FETCHED", 1)
    ledger = a_ledger()
    for number in range(1, 7):
        submit(ledger, build.step("m", number))
        ledger.complete(ledger.sequence.take(), Stepped(metrics={}))
    assert all(ledger.find(number).state is not None for number in range(1, 7))


def test_results_that_nobody_fetched_are_bounded_in_bytes_and_the_newest_stays(build, monkeypatch):
    monkeypatch.setattr(ledgers, "MAX_UNFETCHED_BYTES", 100)
    ledger = a_ledger()
    for number, size in ((1, 20), (2, 20), (3, 500)):
        entry = submit(ledger, build.step("m", number))
        ledger.sequence.take()
        ledger.complete(entry, passed_of(size))
    for number in (1, 2):
        with pytest.raises(Gone):
            ledger.find(number)
    assert ledger.find(3).state is not None


def test_ended_models_share_a_bound_and_errors_and_the_way_back_outlive_it(build, monkeypatch):
    monkeypatch.setattr(rosters, "MAX_ENDED_BYTES", 100)
    roster = Roster()
    for name in ("a", "b"):
        ledger = Ledger(model_id=ModelId(name), max_queued=10)
        creation = ledger.open_creation(fingerprint(build.model(name)))
        model = Model(request=build.model(name), ledger=ledger, creation=creation)
        roster.add(model)
        for number in (1, 2):
            entry = submit(ledger, build.step(name, number))
            ledger.sequence.take()
            if number == 1:
                ledger.complete(entry, passed_of(20))
            else:
                ledger.fail(entry, InvalidRequest("wrong"))
        roster.end(model, "over")
    with pytest.raises(Gone, match="create a new training client"):
        roster.entry("a:1")
    assert roster.entry("a:2")[1].state is not None
    assert roster.entry("b:1")[1].state is not None


def passed_of(num_floats):
    """A result of four bytes per number."""
    return Passed(logprobs=(Tensor.of(np.zeros(num_floats, np.float32), "float32"),), metrics={})


def test_too_many_waiting_operations_are_refused(build):
    ledger = a_ledger(max_queued=2)
    submit(ledger, build.step("m", 2))
    submit(ledger, build.step("m", 3))
    with pytest.raises(Saturated, match="number 1"):
        submit(ledger, build.step("m", 4))
    # The number that the others wait for is always let in.
    submit(ledger, build.step("m", 1))
    assert ledger.sequence.missing() is None


def test_too_many_waiting_bytes_are_refused_until_some_finish(build, monkeypatch):
    monkeypatch.setattr(ledgers, "MAX_UNFINISHED_BYTES", 100)
    ledger = a_ledger()
    big = build.forward_backward("m", 1, datums=(build.datum(n=64),))
    submit(ledger, big)
    with pytest.raises(Saturated):
        submit(ledger, build.forward_backward("m", 2))
    ledger.complete(ledger.sequence.take(), Stepped(metrics={}))
    submit(ledger, build.forward_backward("m", 2))


def test_a_number_that_was_never_used_has_no_future():
    with pytest.raises(NotFound):
        a_ledger().find(7)


def test_a_finished_operation_lets_its_payload_go(build):
    ledger = a_ledger()
    entry = submit(ledger, build.forward_backward("m", 1))
    ledger.complete(ledger.sequence.take(), Stepped(metrics={}))
    assert entry.operation is None


def test_a_window_that_failed_refuses_one_step_and_then_starts_clean():
    window = Window()
    window.passed()
    window.spoil("forward_backward number 2", InvalidRequest("bad"))
    refusal = window.refusal()
    assert isinstance(refusal, InvalidRequest)
    assert "number 2" in refusal.message
    window.close()
    window.passed()
    assert window.refusal() is None
