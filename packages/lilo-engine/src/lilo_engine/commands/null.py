"""Null backend: a trainer that computes nothing, so that only the engine around it is measured. Implements `Backend`.

Models, slots, captures and checkpoints are those of `MemoryBackend`; passes answer zeros of the right shape. Found as
`null` in the entry-point group `lilo.backends`, so that it can run behind the bridge in a process of its own.
"""

from __future__ import annotations

from lilo_engine.commands.command import Batch, Output
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.tensor import Tensor

_FLOAT32_BYTES = 4


class NullBackend(MemoryBackend):
    """A trainer without arithmetic."""

    def forward_backward(self, batch: Batch) -> list[Output]:
        """Zeros for every target; one output per item, in order."""
        return [
            Output(
                operation_id=item.operation_id,
                logprobs=tuple(_zeros(datum) for datum in item.datums),
                metrics={"loss:sum": 0.0, "datums:sum": float(len(item.datums))},
            )
            for item in batch.items
        ]


def _zeros(datum: Datum) -> Tensor:
    shape = datum.loss_inputs["target_tokens"].shape
    size = _FLOAT32_BYTES
    for axis in shape:
        size *= axis
    return Tensor(dtype="float32", shape=shape, data=bytes(size))
