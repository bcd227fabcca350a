"""Coalesce: which passes run in one command. Pure.

Heads of other models come first, then consecutive requests of the models that are in already, the least served
first. Both limits hold together; a request is never split, and one that is larger than the budget runs alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lilo_engine.operations.ledger import Entry
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much one command may hold."""

    max_tokens: int
    max_requests: int | None
    """None = no cap."""
    packs_models: bool = False
    """Whether rows of several models share microbatches; it changes what a plan says, not what it holds."""


@dataclass(slots=True)
class _Group:
    """The passes chosen so far."""

    key: bytes | None
    budget: Budget
    entries: list[Entry] = field(default_factory=list[Entry])
    tokens: int = 0

    def takes(self, entry: Entry | None) -> bool:
        """Whether a further pass fits."""
        return (
            entry is not None
            and entry.key == self.key
            and entry.refusal is None
            and self.has_room(entry.tokens)
        )

    def has_room(self, tokens: int) -> bool:
        """Whether a pass of so many tokens would fit, whatever its key."""
        return not self.is_full and self.tokens + tokens <= self.budget.max_tokens

    @property
    def is_full(self) -> bool:
        limit = self.budget.max_requests
        return limit is not None and len(self.entries) >= limit

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.tokens += entry.tokens


def coalesce(
    anchor: ModelId,
    others: Iterable[ModelId],
    parked: Mapping[ModelId, Sequence[Entry]],
    *,
    served_tokens: Callable[[ModelId], int],
    budget: Budget,
    smallest_tokens: int = 0,
) -> list[Entry]:
    """The passes that run with the head of `anchor`, which is one.

    Args:
        anchor: the model whose turn it is; its head goes whatever its size.
        others: further ready models, in the order in which their heads are tried.
        parked: every model's operations.
        served_tokens: what a model was served so far; decides among consecutive requests.
        budget: limits of the command.
        smallest_tokens: no head of `others` has fewer, so that the search ends when nothing can fit any more.
    """
    head = parked[anchor].peek()
    assert head is not None, f"{anchor} has an operation ready"
    group = _Group(head.key, budget)
    group.add(head)
    members = [anchor]
    for model_id in others:
        if not group.has_room(smallest_tokens):
            break
        entry = parked[model_id].peek()
        if entry is not None and group.takes(entry):
            group.add(entry)
            members.append(model_id)
    _add_tails(group, members, parked, served_tokens)
    return group.entries


def _add_tails(
    group: _Group,
    members: list[ModelId],
    parked: Mapping[ModelId, Sequence[Entry]],
    served_tokens: Callable[[ModelId], int],
) -> None:
    """Add consecutive requests, always of the model that would have been served the fewest tokens."""
    taken = {entry.operation.model_id: entry.tokens for entry in group.entries if entry.operation}
    queue = [(served_tokens(m) + taken[m], i, 1) for i, m in enumerate(members)]
    heapq.heapify(queue)
    while queue and not group.is_full:
        served, index, ahead = heapq.heappop(queue)
        entry = parked[members[index]].peek(ahead)
        if entry is not None and group.takes(entry):
            group.add(entry)
            heapq.heappush(queue, (served + entry.tokens, index, ahead + 1))
