"""What layers keep never changes numbers, and a rank plans it as `lilo plan` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lilo_definitions
import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_definitions.planner import Job, beside_sampler, make_plan
from lilo_definitions.trainer import KEEPS
from lilo_miles_backend.ranks.collectives import ALONE
from lilo_miles_backend.ranks.levels import LayerLevels
from lilo_miles_backend.ranks.memory import DeviceMemory

from tests.miles_backend import reference as ref

GPU_BYTES = 150.1e9


def test_a_definitions_level_reaches_the_layers_and_changes_no_bit(
    random_models: dict[str, Definition], tmp_path: Path
) -> None:
    results = []
    for level, wanted in (("auto", "all"), ("attention", "attention")):
        definition = random_models["tied"].derive(trainer={"keep_activations": level})
        backend = ref.start(definition, tmp_path / level)
        backend.create_adapter("m", ref.spec(4))
        ref.randomize(backend, "m")
        datums = ref.ragged((5, 17, 30), np.random.default_rng(3), vocab=97)
        (output,) = ref.run(backend, ref.item("m", datums))
        assert set(backend.ranks.rank._model.levels) == {wanted}  # on a CPU auto keeps everything
        results.append((ref.numbers(output), ref.gradients_of(backend, "m")))
        backend.close()
    (ours, gradients), (theirs, others) = results
    assert ours == theirs
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_14b"])
def test_a_rank_chooses_what_the_plan_shows(name: str) -> None:
    definition = lilo_definitions.get(name)
    memory = DeviceMemory(torch.device("cpu"), torch.bfloat16)
    memory.total_bytes = int(GPU_BYTES)
    levels = LayerLevels(definition, memory, ALONE)
    tokens = definition.limits.max_tokens_per_rank
    job = beside_sampler(Job.of(definition), definition)
    plan = make_plan(replace(job, tokens_per_rank=tokens))
    assert levels.of(tokens) == plan.levels
    assert levels.planned_bytes(tokens) == plan.memory.peak
    shorter = levels.of(tokens // 4)
    assert all(
        KEEPS.index(less) >= KEEPS.index(more)
        for less, more in zip(shorter, plan.levels, strict=True)
    )


def test_a_smaller_gpu_keeps_less() -> None:
    definition = lilo_definitions.get("qwen3_14b")
    chosen = []
    for size in (GPU_BYTES, 0.93 * GPU_BYTES):
        memory = DeviceMemory(torch.device("cpu"), torch.bfloat16)
        memory.total_bytes = int(size)
        chosen.append(LayerLevels(definition, memory, ALONE).of(16_384))
    assert sum(map(KEEPS.index, chosen[0])) > sum(map(KEEPS.index, chosen[1]))
