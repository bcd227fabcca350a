"""A model made again on a new trainer in memory, from its base and what an engine recorded of it since."""

import numpy as np
from lilo_definitions import get
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.operations.operation import ForwardBackward


async def repeated(engine, model_id, lora, checkpoints_root):
    """The adapter, and the plans in the order of their operations."""
    config = BackendConfig(definition=get("tiny"), checkpoints_root=str(checkpoints_root), epoch=9)
    backend = MemoryBackend(config)
    backend.create_adapter(model_id, lora)
    base, done = engine.history.base(model_id), engine.history.done(model_id)
    if base.source is not None:
        backend.load(model_id, base.source, with_optimizer=base.with_optimizer)
    plans = []
    async for plan, operation in engine.files.repeat(done):
        plans.append(plan)
        if isinstance(operation, ForwardBackward):
            item = WorkItem(operation_id="again", model_id=model_id, datums=operation.datums)
            batch = Batch(
                loss=operation.loss,
                config=operation.loss_config,
                forward_only=False,
                items=(item,),
            )
            backend.forward_backward(batch)
        else:
            backend.optim_step(model_id, operation.params)
    return backend._adapters[model_id], plans


def same(left, right):
    """Whether two adapters are equal to the last bit, with their moments and gradients."""
    arrays = ("weights", "exp_avg", "exp_avg_sq", "gradients")
    return left.optimizer_step == right.optimizer_step and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays
    )
