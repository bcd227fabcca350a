"""A whole model on Triton's kernels, through their interpreter: packed passes and a step have the numbers of torch's.

    TRITON_INTERPRET=1 pytest tests/miles_backend/test_triton_model.py

The variable is read when Triton is imported, which libraries of a model do before a test could set it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from lilo_miles_backend.ranks import model as models
from lilo_miles_backend.ranks.kernels.kernels import Kernels

from tests.miles_backend import reference as ref
from tests.miles_backend.random_families import write_model

pytest.importorskip("triton", reason="it comes with the CUDA builds of torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter was not asked for"
    ),
]

EXACT = 2e-5
"""max|d| / max|ref| of a tensor: float32 on both sides, through all layers."""
SPECS = {
    "small": ref.spec(1, seed=1),
    "attention": ref.spec(3, seed=2, mlp=False),
    "layers": ref.spec(3, seed=3, unembed=False),
    "head": ref.spec(8, seed=4, attn=False, mlp=False),
}
ITEMS = (("small", (3, 1)), ("attention", (9,)), ("small", (5,)), ("layers", (2,)), ("head", (4,)))
"""Lengths of the rows of each pass; one model has two."""


def _triton(_: torch.device) -> Kernels:
    from lilo_miles_backend.ranks.kernels.triton_elementwise import TritonElementwise
    from lilo_miles_backend.ranks.kernels.triton_logits import TritonLogits
    from lilo_miles_backend.ranks.kernels.triton_lora import TritonLora
    from lilo_miles_backend.ranks.kernels.triton_optimizer import TritonOptimizer

    return Kernels(
        elementwise=TritonElementwise(),
        lora=TritonLora(),
        logits=TritonLogits(),
        optimizer=TritonOptimizer(),
    )


def test_packed_passes_of_many_adapters_and_their_steps_have_the_numbers_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = write_model(tmp_path / "model", "qwen3").derive(trainer={"pack_models": True})
    found = []
    for name, kernels_of in (("torch", models.kernels_of), ("triton", _triton)):
        monkeypatch.setattr(models, "kernels_of", kernels_of)
        backend = ref.start(definition, tmp_path / name)
        for model_id, spec in SPECS.items():
            backend.create_adapter(model_id, spec)
            ref.randomize(backend, model_id, seed=spec.lora_rank)
        rng = np.random.default_rng(0)
        items = [
            ref.item(model_id, ref.ragged(lengths, rng, vocab=97), f"op-{index}")
            for index, (model_id, lengths) in enumerate(ITEMS)
        ]
        losses = [output.metrics["loss:sum"] for output in ref.run(backend, *items)]
        numbers: dict[str, torch.Tensor] = {}
        for model_id in SPECS:
            for factor, gradient in ref.gradients_of(backend, model_id).items():
                numbers[f"{model_id} {factor} gradient"] = gradient.clone()
            backend.optim_step(model_id, ref.ADAM)
            for factor, weight in ref.state_of(backend, model_id).weights.items():
                numbers[f"{model_id} {factor}"] = weight
        found.append((losses, numbers))
        backend.close()
    (right, expected), (ours, numbers) = found
    assert ours == pytest.approx(right, rel=EXACT)
    assert ref.worst(numbers, expected) <= EXACT
