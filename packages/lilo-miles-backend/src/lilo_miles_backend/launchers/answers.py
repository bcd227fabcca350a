"""Answers: what the ranks' answers to one command come to: values, one refusal, or a group that is out of step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from lilo_engine.errors import LiloError

from lilo_miles_backend.launchers.mailboxes import Done, Mailbox, RankFault

Answer: TypeAlias = "Done | LiloError | RankFault"


class Disagreement(Exception):
    """Some ranks carried a command out and others refused it: they hold different states now."""


def settle(mailbox: Mailbox, answers: Mapping[int, Answer]) -> list[object]:
    """The values in rank order.

    Args:
        mailbox: Where the command was posted.
        answers: Of all ranks that got it, none of them a fault.

    Raises:
        LiloError: what the ranks refused it with.
        Disagreement: they do not agree; names what each said.
    """
    in_order = [answers[rank] for rank in sorted(answers)]
    errors = [answer for answer in in_order if isinstance(answer, LiloError)]
    if not errors:
        return [answer.value for answer in in_order if isinstance(answer, Done)]
    # A publication is agreed on over its own group; every rank hears the outcome in words of its own.
    if mailbox == "train" and {type(answer) for answer in in_order} != {type(errors[0])}:
        raise Disagreement(
            "; ".join(
                f"rank {rank}: {answer if isinstance(answer, LiloError) else 'done'}"
                for rank, answer in sorted(answers.items())
            )
        )
    raise errors[0]


def any_refused(mailbox: Mailbox, answers: Mapping[int, Answer]) -> bool:
    """Whether a rank refused: in the train mailbox all do so at once, or none."""
    return mailbox == "train" and any(isinstance(one, LiloError) for one in answers.values())
