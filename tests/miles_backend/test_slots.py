"""Slots over any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lilo_engine.errors import NotFound, Saturated
from lilo_engine.operations.operation import ModelId
from lilo_miles_backend.ranks.slots import SlotTable


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_slots_never_share_an_index_and_generations_never_recur(
    events: list[tuple[bool, int]],
) -> None:
    table, held, seen = SlotTable(3), {}, set()
    for take, number in events:
        model = ModelId(f"m{number}")
        if not take:
            table.free(model)
            held.pop(model, None)
        elif model in table:
            assert table.of(model) == held[model]
        elif len(held) == 3:
            with pytest.raises(Saturated):
                table.take(model)
        else:
            slot = table.take(model)
            assert slot.index not in {other.index for other in held.values()}
            assert slot.generation not in seen
            held[model] = slot
            seen.add(slot.generation)
    with pytest.raises(NotFound):
        table.of(ModelId("nobody"))
