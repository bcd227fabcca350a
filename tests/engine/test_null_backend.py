"""Null backend: answers of the right shape, and nothing computed."""

import numpy as np
import pytest
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.commands.discovery import find_backend
from lilo_engine.commands.null import NullBackend
from lilo_engine.operations.operation import ModelId


def test_a_pass_answers_zeros_of_the_shape_of_its_targets(build, tiny, tmp_path):
    config = BackendConfig(definition=tiny, checkpoints_root=str(tmp_path), epoch=1)
    backend = find_backend("null")(config)
    assert isinstance(backend, NullBackend)
    items = [
        WorkItem(operation_id=f"m:{n}", model_id=ModelId("m"), datums=(build.datum(n=n),))
        for n in (1, 5)
    ]
    batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=tuple(items))
    outputs = backend.forward_backward(batch)
    assert [output.operation_id for output in outputs] == ["m:1", "m:5"]
    for n, output in zip((1, 5), outputs, strict=True):
        np.testing.assert_array_equal(output.logprobs[0].numpy(), np.zeros(n, np.float32))
    backend.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_lilo_bench_engine_measures_a_server_of_its_own():
    """One section end to end: a child with front, engine, bridge and null backend."""
    from lilo_engine.bench.run import run

    report = run(("parked",))
    assert [row["parked_bytes"] > 0 for row in report["parked"].values()] == [False, True, True]
    assert report["ratios"]["parked_most_to_least"] > 0
