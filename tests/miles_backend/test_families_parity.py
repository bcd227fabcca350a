"""Llama and hybrids train with float64's numbers, and their weights go back to files bit for bit, on one rank.

All layouts, faults put in on purpose and transformers beside it are `make prove-families`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_miles_backend import MilesBackend
from lilo_miles_backend.adapter_state import assemble
from lilo_miles_backend.families.read import read_shape
from lilo_miles_backend.ranks.write_weights import write_weights
from safetensors.torch import load_file

from tests.miles_backend import reference as ref
from tests.miles_backend.exact import Exact
from tests.miles_backend.random_families import VOCAB, write_model

LIMIT = 2e-5
"""max|d| / max|ref| of a tensor, float32 against float64."""
LENGTHS = (17, 1, 37, 2, 5)


@pytest.fixture(scope="module", params=["llama", "qwen3_5 multimodal"])
def definition(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Definition:
    return write_model(tmp_path_factory.mktemp("families") / "model", request.param)


@pytest.fixture(scope="module")
def backend(
    definition: Definition, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilesBackend]:
    started = ref.start(definition, tmp_path_factory.mktemp("checkpoints"))
    yield started
    started.close()


def test_loss_logprobs_and_every_gradient_are_those_of_float64(
    definition: Definition, backend: MilesBackend
) -> None:
    backend.create_adapter("m", ref.spec(4))
    ref.randomize(backend, "m")
    rng = np.random.default_rng(0)
    datums = [ref.datum(n, rng, vocab=VOCAB, weights=rng.normal(1, 1, size=n)) for n in LENGTHS]

    (output,) = ref.run(backend, ref.item("m", datums))

    assert output.error is None
    # A rank keeps the rows of some factors in its own order; assembled, they are in the files'.
    model = Exact(Path(definition.model.source), assemble([ref.state_of(backend, "m")]))
    logprobs = [model.logprobs(one) for one in datums]
    loss = ref.cross_entropy(datums, logprobs)
    loss.backward()
    assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=LIMIT)
    ours = torch.from_numpy(np.concatenate([one.numpy() for one in output.logprobs]))
    assert ref.relative(ours, torch.cat(logprobs).detach()) <= LIMIT
    shards = backend.ranks.rank.adapter("m").shards
    gradients: dict[str, torch.Tensor] = {}
    for name, part in ref.gradients_of(backend, "m").items():
        gradients[name] = torch.empty(shards[name].full)
        gradients[name][shards[name].index] = part
    assert ref.worst(gradients, model.gradients()) <= LIMIT


def test_weights_go_back_to_files_bit_for_bit(
    definition: Definition, backend: MilesBackend, tmp_path: Path
) -> None:
    source = Path(definition.model.source)
    model = backend.ranks.rank._model
    write_weights(model._gpt, model.shape, tmp_path, model.origin, file_bytes=30_000)

    left_out = read_shape(source).left_out or ("\0",)
    read = load_file(source / "model.safetensors")
    read = {name: t for name, t in read.items() if not name.startswith(left_out)}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    written = {name: t for file in files for name, t in load_file(file).items()}
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in read.items())
