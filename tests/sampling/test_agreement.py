"""Trainer and sampler say the same of the same tokens under the same adapter, in every family."""

from __future__ import annotations

from dataclasses import replace

import anyio
import numpy as np
import pytest
from lilo_engine.commands.command import Destination
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.tensor import Tensor

from tests.miles_backend import reference as ref
from tests.miles_backend.random_families import VOCAB, write_model
from tests.sampling.conftest import embedded_engine
from tests.sampling.families import FAMILIES, random_text
from tests.sampling.words import floats, request, tokens

pytestmark = pytest.mark.anyio
MODEL = "0ab:train:0"


def scored(backend, ids: list[int]) -> np.ndarray:
    """Logprob of every token after the first, by the trainer."""
    targets = {"target_tokens": Tensor.of(np.asarray(ids[1:]), "int64")}
    targets["weights"] = Tensor.of(np.ones(len(ids) - 1), "float32")
    datum = Datum(tokens=Tensor.of(np.asarray(ids[:-1]), "int32"), loss_inputs=targets)
    (output,) = ref.run(backend, ref.item(MODEL, [datum]), forward_only=True)
    return output.logprobs[0].numpy()


def trained(backend) -> str:
    """Two large steps away from the base model; the folder of the published sampler weights."""
    backend.create_adapter(MODEL, ref.spec(4))
    for seed in (1, 2):
        data = ref.ragged((30, 11), np.random.default_rng(seed), vocab=VOCAB)
        ref.run(backend, ref.item(MODEL, data))
        backend.optim_step(MODEL, replace(ref.ADAM, learning_rate=0.02))
    destination = Destination(
        run_id=MODEL, kind="sampler_weights", name="s", order=1, overwrite=False
    )
    return backend.persist(backend.capture(MODEL, "sampler"), destination).folder


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_of_samples_are_the_trainers(family, tmp_path):
    definition = write_model(tmp_path / "model", family)
    backend = ref.start(definition, tmp_path / "checkpoints")
    try:
        prompt = random_text(40, 3)
        base = None
        async with embedded_engine(definition, tmp_path) as sampler:
            with anyio.fail_after(50):
                await sampler.load("trained", trained(backend))
                asked = request(prompt, n=2, adapter="trained", seed=1, prompt_logprobs=True)
                result = await sampler.sample(asked)
                base = await sampler.sample(request(prompt, max_tokens=1, prompt_logprobs=True))
        for sequence in result.sequences:
            got = [*floats(result.prompt_logprobs)[1:], *floats(sequence.logprobs)]
            wanted = scored(backend, [*prompt, *tokens(sequence)])
            np.testing.assert_allclose(got, wanted, atol=1e-4)
        # The adapter changes the numbers by far more than they may differ.
        moved = np.abs(floats(base.prompt_logprobs)[1:] - floats(result.prompt_logprobs)[1:])
        assert moved.max() > 0.1
    finally:
        backend.close()
