"""The arithmetic of the demo's loop: questions, rewards, advantages, the shift by one."""

import random

import pytest
from lilo_engine.demo import rl_arithmetic as rl
from tinker import types


class Bytes:
    """A tokenizer of bytes with 257 as its end."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=False):
        return bytes(token for token in token_ids if token < 256).decode()


def sequence(text, *, ended=True):
    tokens = [*text.encode(), *([257] if ended else [])]
    return types.SampledSequence(
        stop_reason="stop" if ended else "length",
        sequence_id="s",
        _tokens_list=tokens,
        _logprobs_list=[-0.5 - index for index in range(len(tokens))],
    )


def test_the_exam_is_the_same_everywhere_and_training_never_asks_it():
    assert len(rl.EXAM) == len(set(rl.EXAM)) == 256
    assert [question.prompt for question in rl.EXAM[:3]] == ["15-64=", "65+28=", "76-73="]
    asked = rl.draw_questions(random.Random(0), 5000, exclude=rl.EXAM)
    assert set(asked).isdisjoint(rl.EXAM)
    assert len(set(asked)) == 5000


@pytest.mark.parametrize(
    ("said", "ended", "earned"),
    [("-15", True, 1.0), ("-15", False, 0.0), ("15", True, 0.0), ("-150", True, 0.0)],
)
def test_only_the_right_answer_that_the_model_ended_itself_earns(said, ended, earned):
    question = rl.Question(37, "-", 52)
    assert rl.reward(Bytes(), question, sequence(said, ended=ended)) == earned


def test_a_datum_pairs_each_sampled_token_with_its_logprob_and_leaves_the_prompt_out():
    datum = rl.make_datum([1, 2, 3], sequence("45"), 0.25)
    assert datum.model_input.to_ints() == [1, 2, 3, 52, 53]
    inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [2, 3, 52, 53, 257]
    assert inputs["advantages"] == [0.0, 0.0, 0.25, 0.25, 0.25]
    assert inputs["logprobs"] == [0.0, 0.0, -0.5, -1.5, -2.5]


def test_a_group_without_a_difference_teaches_nothing_and_advantages_add_up_to_zero():
    right, wrong = sequence("15"), sequence("16")
    questions = [rl.Question(7, "+", 8)] * 3
    groups = [[right, right], [right, wrong], [wrong, wrong]]
    data, mean = rl.make_batch(Bytes(), questions, groups)
    assert mean == 0.5
    assert len(data) == 2
    advantages = [datum.loss_fn_inputs["advantages"].tolist()[-1] for datum in data]
    assert advantages == pytest.approx([0.5 / 18, -0.5 / 18])
