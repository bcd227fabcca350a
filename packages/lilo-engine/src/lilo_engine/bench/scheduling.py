"""Scheduling: what one pass of the scheduler costs with calls parked, in this process, without a server."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from lilo_engine.operations.datum import Datum
from lilo_engine.operations.fingerprint import Fingerprint
from lilo_engine.operations.ledger import Ledger
from lilo_engine.operations.operation import ForwardBackward, ModelId
from lilo_engine.operations.tensor import Tensor
from lilo_engine.schedule.coalesce import Budget
from lilo_engine.schedule.lanes import Lanes
from lilo_engine.schedule.scheduler import Scheduler

PARKED = (8, 128, 512, 1024)
CALL_BYTES = 76_000
"""Of one parked call."""
_PASSES = 64
_TOKENS = 64


def passes() -> dict[str, Any]:
    """Milliseconds of one pass, by the number of parked calls of 76 KB, each of a model of its own."""
    return {str(parked): _one(parked) for parked in PARKED}


def _one(parked: int) -> dict[str, float]:
    scheduler = Scheduler(
        budget=Budget(max_tokens=_TOKENS, max_requests=None), lanes=Lanes(publication_workers=2)
    )
    ledgers: dict[ModelId, Ledger] = {}
    operations = _operations(parked)
    for operation in operations:
        ledger = Ledger(model_id=operation.model_id, max_queued=1024)
        ledgers[operation.model_id] = ledger
        scheduler.add(operation.model_id, ledger.sequence)
        ledger.submit(operation, Fingerprint(b""), None)
    took: list[float] = []
    for _ in range(min(_PASSES, parked)):
        started = time.perf_counter()
        plan = scheduler.next_plan()
        took.append(1e3 * (time.perf_counter() - started))
        assert plan is not None
        for entry in plan.entries:
            assert entry.operation is not None
            ledgers[entry.operation.model_id].sequence.take()
    # The first one looks at everything that came since the last; the others at what changed.
    return {
        "parked_bytes": parked * CALL_BYTES,
        "p50_ms": float(np.median(took)),
        "first_ms": took[0],
    }


def _operations(parked: int) -> list[ForwardBackward]:
    filling = Tensor.of(np.zeros(CALL_BYTES // 4, dtype=np.float32), "float32")
    tokens = Tensor.of(np.zeros(_TOKENS, dtype=np.int32), "int32")
    return [
        ForwardBackward(
            model_id=ModelId(f"model-{index}"),
            seq_id=1,
            datums=(Datum(tokens=tokens, loss_inputs={"weights": filling}),),
            loss="cross_entropy",
            loss_config={},
            forward_only=False,
        )
        for index in range(parked)
    ]
