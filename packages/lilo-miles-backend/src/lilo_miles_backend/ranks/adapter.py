"""Adapter: one model's LoRA factors, their gradients and Adam's moments, and how they come and go as AdapterState.

Four flat float32 buffers of equal layout (weights, gradients, two moments) hold everything, and where the model computes
in another dtype a fifth holds the weights in it; the factors of each site are views. So a step, a norm, a capture or a later all-reduce is one operation over one buffer, whatever the number of
modules, and an adapter that does not exist costs nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from lilo_engine.operations.operation import LoraSpec

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.ranks.collectives import ALONE, Axis
from lilo_miles_backend.ranks.kernels.kernels import AdamBuffers
from lilo_miles_backend.ranks.lora import Factors
from lilo_miles_backend.ranks.sites import LoraSite, factor_shards
from lilo_miles_backend.shards import FactorShard


class Adapter:
    """One resident model's trainable state."""

    def __init__(
        self,
        spec: LoraSpec,
        sites: Sequence[LoraSite],
        device: torch.device,
        tp: Axis = ALONE,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Fresh weights: A drawn from (seed, module name) alone, B zero.

        Args:
            spec: what is trained, with its seed drawn.
            sites: of the groups that the spec trains.
            device: where the buffers live.
            tp: the ranks that hold the other parts of the factors.
            dtype: what the model computes in.
        """
        assert spec.seed is not None, "the driver draws a seed before the ranks see the spec"
        assert sites, "an adapter trains at least one module"
        self.spec = spec
        self.optimizer_step = 0
        self.num_passes = 0
        """Backward passes in this gradient window; 0: there are no gradients."""
        self.trains_decoder = any(site.path is not None for site in sites)
        self._shards = factor_shards(sites, spec.lora_rank, tp)
        self._sizes = {name: shard.shape for name, shard in self._shards.items()}
        count = sum(math.prod(size) for size in self._sizes.values())
        self.weights = torch.zeros(count, device=device)
        self.gradients = torch.zeros(count, device=device)
        self.exp_avg = torch.zeros(count, device=device)
        self.exp_avg_sq = torch.zeros(count, device=device)
        self._computed = (
            self.weights
            if dtype == torch.float32
            else torch.zeros(count, dtype=dtype, device=device)
        )
        self._computed_version = -1
        self.factors = self._factors(sites)
        self._draw(spec.seed)

    def named(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat buffer by slot-free name, `{module}.lora_A` [r, in] and `{module}.lora_B` [out, r]."""
        parts = buffer.split([math.prod(size) for size in self._sizes.values()])
        return {
            name: part.view(size)
            for (name, size), part in zip(self._sizes.items(), parts, strict=True)
        }

    @property
    def shards(self) -> Mapping[str, FactorShard]:
        """Which part of each factor this rank holds, by name."""
        return self._shards

    @property
    def num_replicated(self) -> int:
        """How many of a buffer's first elements are factors that every tensor-parallel rank holds whole."""
        return sum(math.prod(part.shape) for part in self._shards.values() if part.dim is None)

    def refresh(self) -> None:
        """Bring the copies that products are computed with up to date, if the weights changed since the last time.

        torch counts every write into a tensor, through whichever view: so nobody who writes has to say so.
        """
        version = self.weights._version
        if self._computed is not self.weights and self._computed_version != version:
            self._computed.copy_(self.weights)
            self._computed_version = version

    @property
    def buffers(self) -> AdamBuffers:
        """What a step reads and writes."""
        return AdamBuffers(
            weights=self.weights,
            gradients=self.gradients,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            copy=None if self._computed is self.weights else self._computed,
        )

    def drop_gradients(self) -> None:
        """Start a new window."""
        self.gradients.zero_()
        self.num_passes = 0

    def export(self, base_model: str, *, with_optimizer: bool) -> AdapterState:
        """A detached copy on the CPU; later steps do not change it."""
        moments = (self.exp_avg, self.exp_avg_sq) if with_optimizer else ()
        weights, *copies = (
            self.named(b.detach().to("cpu", copy=True)) for b in (self.weights, *moments)
        )
        exp_avg, exp_avg_sq = copies or ({}, {})
        return AdapterState(
            base_model=base_model,
            spec=self.spec,
            optimizer_step=self.optimizer_step,
            weights=weights,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            shards={name: shard for name, shard in self._shards.items() if shard.dim is not None},
        )

    def restore(self, state: AdapterState, *, with_optimizer: bool) -> None:
        """Take over a state of the same names and shapes; without the optimizer its moments and steps are fresh."""
        self.drop_gradients()
        _copy(self.named(self.weights), state.weights)
        if with_optimizer:
            _copy(self.named(self.exp_avg), state.exp_avg)
            _copy(self.named(self.exp_avg_sq), state.exp_avg_sq)
            self.optimizer_step = state.optimizer_step
        else:
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
            self.optimizer_step = 0

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """Shape of each factor by name."""
        return self._sizes

    def _factors(self, sites: Sequence[LoraSite]) -> dict[str, Factors]:
        weights, gradients = self.named(self._computed), self.named(self.gradients)
        factors: dict[str, Factors] = {}
        for site in sites:
            names = [module.name for module in site.modules]
            factors[site.name] = Factors(
                scale=self.spec.alpha / self.spec.lora_rank,
                lora_rank=self.spec.lora_rank,
                a=_stacked([weights[f"{name}.lora_A"] for name in names]),
                b=_stacked([weights[f"{name}.lora_B"] for name in names]),
                grad_a=_stacked([gradients[f"{name}.lora_A"] for name in names]),
                grad_b=_stacked([gradients[f"{name}.lora_B"] for name in names]),
            )
        return factors

    def _draw(self, seed: int) -> None:
        for name, weight in self.named(self.weights).items():
            if name.endswith(".lora_A"):
                part = self._shards[name]
                whole = initial_a(seed, name.removesuffix(".lora_A"), part.full)
                weight.copy_(whole[part.index])


def initial_a(seed: int, module: str, size: tuple[int, ...]) -> torch.Tensor:
    """First A of one module: uniform in +-1/sqrt(in), float32, shape `size` = [r, in].

    That is Kaiming's uniform with a = sqrt(5), as PEFT draws it. The generator is seeded by SHA-256 of "seed:module", so
    that the numbers depend on neither slot, layout nor which other modules are trained.
    """
    digest = hashlib.sha256(f"{seed}:{module}".encode()).digest()
    # manual_seed takes 64 bits, signed or not; 63 are enough to tell modules apart.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(size[-1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The A's or B's of one site as one view: they lie next to each other in the buffer, in the modules' order."""
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    return first.as_strided((rows, first.shape[1]), first.stride())


def _copy(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    assert targets.keys() == sources.keys(), (
        "a state is checked against the adapter before it is restored"
    )
    for name, target in targets.items():
        target.copy_(sources[name])
