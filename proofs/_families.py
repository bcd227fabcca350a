"""What the proof `families` compares, writes and counts. Not a proof."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lilo_definitions import Definition, Topology, resolve_source
from lilo_definitions.architectures import ARCHITECTURES
from lilo_miles_backend.families.read import read_shape
from safetensors.torch import load_file

from tests.definitions import meta_models
from tests.miles_backend import reference as ref
from tests.miles_backend.exact import Exact
from tests.miles_backend.layouts import World, world
from tests.miles_backend.random_families import VOCAB

if TYPE_CHECKING:
    from lilo_engine.operations.datum import Datum
    from lilo_miles_backend.adapter_state import AdapterState

LENGTHS = (17, 70, 1, 2, 33, 13, 5, 3)
"""Odd ones, one of a single token, one over several chunks of the delta rule; packed into one stream."""


@dataclass(frozen=True)
class Errors:
    """How far one run is from float64."""

    loss: float
    logprobs: float
    gradients: float
    worst: str
    num_gradients: int


@dataclass(frozen=True)
class Compared:
    """One adapter's numbers on some rows, in float64."""

    definition: Definition
    state: AdapterState
    datums: Sequence[Datum]
    loss: float
    logprobs: torch.Tensor
    gradients: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, definition: Definition, state: AdapterState) -> Compared:
        """Compute them."""
        rng = np.random.default_rng(0)
        # Weights of either sign around 1: their sum, the loss, must not cancel to rounding itself.
        datums = [ref.datum(n, rng, vocab=VOCAB, weights=rng.normal(1, 1, size=n)) for n in LENGTHS]
        model = Exact(resolve_source(definition.model.source), state)
        logprobs = [model.logprobs(one) for one in datums]
        loss = ref.cross_entropy(datums, logprobs)
        loss.backward()
        return cls(
            definition=definition,
            state=state,
            datums=datums,
            loss=float(loss.detach()),
            logprobs=torch.cat(logprobs).detach(),
            gradients=model.gradients(),
        )

    def errors(self, ranks: World) -> Errors:
        """Of one pass of the trainer."""
        (output,) = ranks.run(ref.item("m", self.datums))
        assert output.error is None, output.error
        assert all(
            torch.equal(tensor, self.state.weights[name])
            for name, tensor in ranks.state("m").weights.items()
        ), "every layout starts from the same adapter"
        logprobs = torch.cat([torch.from_numpy(one.numpy().copy()) for one in output.logprobs])
        return self._errors(output.metrics["loss:sum"], logprobs, ranks.gradients("m"))

    def against_transformers(self) -> Errors:
        """Of transformers and PEFT in float32."""
        model = ref.Reference.of(self.definition, self.state)
        logprobs = [model.logprobs(one) for one in self.datums]
        loss = ref.cross_entropy(self.datums, logprobs)
        loss.backward()
        return self._errors(float(loss.detach()), torch.cat(logprobs).detach(), model.gradients())

    def _errors(
        self, loss: float, logprobs: torch.Tensor, gradients: Mapping[str, torch.Tensor]
    ) -> Errors:
        assert gradients.keys() == self.gradients.keys(), "every factor has a gradient"
        off = {name: ref.relative(gradients[name], one) for name, one in self.gradients.items()}
        worst = max(off, key=off.__getitem__)
        return Errors(
            loss=abs(loss - self.loss) / abs(self.loss),
            logprobs=ref.relative(logprobs, self.logprobs),
            gradients=off[worst],
            worst=worst,
            num_gradients=len(off),
        )


def same_weights(one: AdapterState, other: AdapterState) -> bool:
    """Whether two adapters are equal bit for bit."""
    return one.weights.keys() == other.weights.keys() and all(
        torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
    )


def exported(definition: Definition, state: AdapterState, snapshot: Path) -> float:
    """Largest difference of logprobs between a published folder in PEFT and the adapter in float64."""
    compared = Compared.of(definition, state)
    model = ref.Reference.exported(definition, snapshot)
    with torch.no_grad():
        theirs = torch.cat([model.logprobs(one) for one in compared.datums])
    return float((theirs - compared.logprobs).abs().max())


def round_trip(definition: Definition, source: Path, root: Path) -> list[str]:
    """Names of the tensors of `source` that are others after they were read by a trainer and written by it."""
    with tempfile.TemporaryDirectory(prefix="weights-", dir=_made(root)) as folder:
        with world(definition, root) as ranks:
            ranks.call(_write, folder)
        written = _tensors(Path(folder))
    left_out = read_shape(source).left_out
    read = {n: t for n, t in _tensors(source).items() if not n.startswith(left_out or ("\0",))}
    same = {
        name
        for name in read.keys() & written.keys()
        if read[name].dtype == written[name].dtype and torch.equal(read[name], written[name])
    }
    return sorted((read.keys() | written.keys()) - same)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _write(rank: Any, folder: str) -> None:
    """On every rank; in several files, since a real model has several."""
    from lilo_miles_backend.ranks.write_weights import write_weights

    base = rank._model
    write_weights(
        base._gpt, base.shape, Path(folder), base.origin, base.parallel.tp, file_bytes=20_000
    )


def published() -> dict[str, dict[str, int]]:
    """Parameters of each published size, as counted by transformers, files, our model and plans; no memory is used."""
    from lilo_miles_backend.ranks.device import Device
    from lilo_miles_backend.ranks.parallel import Parallel

    found: dict[str, dict[str, int]] = {}
    device = Device.of(Topology(), threads=1, local_rank=0, num_devices=1)
    parallel = Parallel.join(Topology(), device, timeout_minutes=1)
    try:
        for name, architecture in ARCHITECTURES.items():
            model = meta_models.build(architecture)
            with tempfile.TemporaryDirectory(prefix="config-") as folder:
                config = json.dumps(model.config.to_dict(), default=str)
                (Path(folder) / "config.json").write_text(config)
                shape = read_shape(Path(folder))
            found[name] = {
                "transformers": meta_models.count(architecture),
                "the files' tensors": sum(prod(size) for size in shape.tensors.values()),
                "the trainer's model": _built(shape, parallel),
                "the planner": architecture.parameters,
            }
    finally:
        parallel.leave()
    return found


def _built(shape: Any, parallel: Any) -> int:
    """Elements of the trainer's own model on the meta device."""
    from lilo_miles_backend.ranks.build import Building, build
    from lilo_miles_backend.ranks.kernels.reference import REFERENCE
    from lilo_miles_backend.ranks.layers.layer import Running

    given = Building(
        shape=shape,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        parallel=parallel,
        kernels=REFERENCE,
        max_positions=64,
    )
    return sum(parameter.numel() for parameter in build(given, Running()).parameters())
