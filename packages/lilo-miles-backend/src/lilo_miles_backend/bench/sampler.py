"""The measured samplers: ours and transformers' `generate` with PEFT, on the same weights, adapters and prompts.

Every section compares methods that take turns (`turns.py`). On CPU ratios are of CPU seconds of this process, since other
programs on the machine take wall time; on a GPU of wall seconds. A ratio above 1 says that ours is faster.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from lilo_definitions import Definition, resolve_source
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.bench.publishing import Publishing
from lilo_miles_backend.bench.sampling_native import NativeSampler
from lilo_miles_backend.bench.sampling_peer import Peer
from lilo_miles_backend.bench.turns import Method, Spent, take_turns
from lilo_miles_backend.ranks.dtype import compute_dtype

SECTIONS = ("one_prompt", "many_prompts", "adapters", "prefill", "publish")
LONG_TOKENS = {"cpu": 4096, "cuda": 16_384}
"""Of the prompt that is prefilled, if the definition's context has room for it."""

Report: TypeAlias = dict[str, dict[str, Any]]
"""Section -> case -> figure -> number; `settings` and `agreement` have no cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated."""

    prompt_tokens: int = 64
    new_tokens: int = 64
    long_tokens: int | None = None
    """None: see `LONG_TOKENS`."""
    counts: tuple[int, ...] = (1, 8, 32)
    """Sequences at once."""
    adapters: int = 4
    """That the most sequences are shared out to."""
    rounds: int = 5
    lora_rank: int = 16
    """At most; a definition may allow less."""


def measure(
    definition: Definition,
    sections: tuple[str, ...] = SECTIONS,
    workload: Workload | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure a definition's model in one process, on its device with one rank.

    Args:
        definition: its model must be here; layout and external sampling engines are left aside.
        sections: of `SECTIONS`.
        workload: None: as it is by default.
        told: is called with each section's name when it begins.

    Raises:
        InvalidRequest: the definition's context is too short for this, or PEFT, the peer, is not installed.
        InvalidSource: the model is not here; says how to get it.
    """
    load = workload or Workload()
    definition = alone(definition, load)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lilo-bench-")))
        bench = _Bench(definition, load, folder, stack)
        report: Report = {"settings": bench.settings, "agreement": bench.agreement()}
        for section in sections:
            told(section)
            report[section] = getattr(bench, section)()
    return report


def alone(definition: Definition, load: Workload) -> Definition:
    """The definition on one rank with the embedded engine, and no more context than is used.

    Raises:
        InvalidRequest: its context is too short.
    """
    device = definition.topology.device
    short = load.prompt_tokens + load.new_tokens
    long = min(load.long_tokens or LONG_TOKENS[device], definition.context - 1)
    context = max(short, long + 1)
    if context > definition.context:
        raise InvalidRequest(
            f"prompts of {load.prompt_tokens} tokens with {load.new_tokens} new ones are over the context of "
            f"{definition.context} of {definition.name!r}; choose less"
        )
    return definition.derive(
        context=context,
        topology={
            "gpu": None,
            "nodes": 1,
            "gpus_per_node": 1 if device == "cuda" else 0,
            "tp": 1,
            "cp": 1,
            "dp": 1,
            "rdma": False,
        },
        limits={"max_tokens_per_rank": max(context, definition.limits.max_tokens_per_rank)},
        sampler={"engine": "embedded", "pool": None, "sequences": max(load.counts)},
    )


class _Bench:
    """Both samplers with the same adapters, and the sections."""

    def __init__(
        self, definition: Definition, load: Workload, folder: Path, stack: ExitStack
    ) -> None:
        self._definition, self._load, self._stack = definition, load, stack
        self._folder = folder
        self._device = torch.device(definition.topology.device)
        self._names = [f"a{index}" for index in range(load.adapters)]
        self._rank = min(load.lora_rank, definition.lora.max_rank)
        self._peer = Peer(
            resolve_source(definition.model.source),
            folder,
            names=self._names,
            lora_rank=self._rank,
            device=self._device,
            dtype=compute_dtype(definition),
        )
        self._ours = stack.enter_context(NativeSampler(definition))
        for name in self._names:
            self._ours.load(name, self._peer.folder_of(name))

    @property
    def settings(self) -> dict[str, Any]:
        """What was measured on what."""
        cuda = self._device.type == "cuda"
        return {
            "definition": self._definition.name,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "dtype": self._definition.dtype,
            "lora_rank": self._rank,
            "prompt_tokens": self._load.prompt_tokens,
            "new_tokens": self._load.new_tokens,
            "ratios_are_of": "wall seconds" if cuda else "CPU seconds",
        }

    def agreement(self) -> dict[str, float]:
        """Ours and the peer compute one thing: how far their logprobs of one sample are apart at most."""
        prompts, name = self._prompts(1), self._names[0]
        (answer,) = self._ours.generate(prompts, new_tokens=self._load.new_tokens, adapters=[name])
        drawn = np.frombuffer(answer.sequences[0].tokens, dtype="<i4").tolist()
        text = prompts[0] + drawn[:-1]  # the last one may stand past the context
        ours, theirs = self._ours.logprobs(text, name), self._peer.logprobs(text, name)
        return {"largest_difference_of_logprobs": float(np.abs(ours - theirs).max())}

    def one_prompt(self) -> dict[str, dict[str, float]]:
        """Samples of one prompt."""
        return {str(count): self._generated(count, distinct=False) for count in self._load.counts}

    def many_prompts(self) -> dict[str, dict[str, float]]:
        """A sample of each of so many prompts."""
        return {str(count): self._generated(count, distinct=True) for count in self._load.counts}

    def _generated(self, count: int, *, distinct: bool) -> dict[str, float]:
        new, name = self._load.new_tokens, self._names[0]
        prompts = self._prompts(count if distinct else 1)
        rows = prompts if distinct else prompts * count
        samples = 1 if distinct else count
        ours = functools.partial(
            self._ours.generate,
            prompts,
            new_tokens=new,
            adapters=[name] * len(prompts),
            num_samples=samples,
        )
        beside = functools.partial(self._peer.beside, rows, new_tokens=new, adapters=[name] * count)
        merged = functools.partial(self._peer.merged, rows, new_tokens=new)
        spent = take_turns(
            {"ours": Method(run=ours), "peft": Method(run=beside), "merged": Method(run=merged)},
            self._load.rounds,
        )
        return self._speeds(spent, count * new)

    def adapters(self) -> dict[str, dict[str, float]]:
        """The most sequences, shared out to several adapters; merged weights take one of them after the other."""
        load = self._load
        each = max(1, max(load.counts) // load.adapters)
        rows = self._prompts(each * load.adapters)
        mixed = [name for name in self._names for _ in range(each)]
        new = load.new_tokens

        def merged() -> None:
            for start in range(0, len(rows), each):
                # The same weights every time: how long it takes does not depend on which.
                self._peer.merged(rows[start : start + each], new_tokens=new)

        def ours(adapters: list[str]) -> Method:
            return Method(
                run=functools.partial(self._ours.generate, rows, new_tokens=new, adapters=adapters)
            )

        methods = {
            "ours": ours(mixed),
            "peft": Method(
                run=functools.partial(self._peer.beside, rows, new_tokens=new, adapters=mixed)
            ),
            "merged": Method(run=merged),
            "ours_one_adapter": ours([self._names[0]] * len(rows)),
        }
        spent = take_turns(methods, load.rounds)
        figures = self._speeds(spent, len(rows) * new)
        figures["ours_against_ours_one_adapter"] = self._ratio(spent, "ours_one_adapter")
        return {f"{len(rows)} of {load.adapters} adapters": figures}

    def prefill(self) -> dict[str, dict[str, float]]:
        """A long prompt and one token."""
        tokens = self._definition.context - 1
        (prompt,) = self._prompts(1, tokens)
        name = self._names[0]
        methods = {
            "ours": Method(
                run=functools.partial(self._ours.generate, [prompt], new_tokens=1, adapters=[name])
            ),
            "peft": Method(
                run=functools.partial(self._peer.beside, [prompt], new_tokens=1, adapters=[name])
            ),
            "merged": Method(run=functools.partial(self._peer.merged, [prompt], new_tokens=1)),
        }
        return {f"{tokens} tokens": self._seconds(take_turns(methods, self._load.rounds))}

    def publish(self) -> dict[str, dict[str, float]]:
        """New weights of a trainer until their first token; the peer's are written and loaded by PEFT."""
        (prompt,) = self._prompts(1)
        folder, name = self._folder / "published", self._names[0]
        with Publishing(self._definition, self._ours, lora_rank=self._rank) as publishing:
            forget = functools.partial(self._peer.forget, "new")
            methods = {
                "ours": Method(
                    run=functools.partial(publishing.publish, prompt), undo=publishing.forget
                ),
                "peft": Method(
                    run=functools.partial(self._peer.publish, folder, prompt, name, "new"),
                    undo=forget,
                ),
                "merged": Method(
                    run=functools.partial(self._peer.publish_merged, folder, prompt, name, "new"),
                    undo=forget,
                ),
            }
            spent = take_turns(methods, self._load.rounds)
        return {f"lora_rank {self._rank}": self._seconds(spent)}

    # ---- figures

    def _speeds(self, spent: Mapping[str, Spent], tokens: int) -> dict[str, float]:
        figures = {f"{name}_tokens_per_s": tokens / one.wall_s for name, one in spent.items()}
        if self._device.type == "cpu":
            figures |= {
                f"{name}_tokens_per_cpu_s": tokens / one.cpu_s for name, one in spent.items()
            }
        return figures | self._ratios(spent)

    def _seconds(self, spent: Mapping[str, Spent]) -> dict[str, float]:
        figures = {f"{name}_s": one.wall_s for name, one in spent.items()}
        if self._device.type == "cpu":
            figures |= {f"{name}_cpu_s": one.cpu_s for name, one in spent.items()}
        return figures | self._ratios(spent)

    def _ratios(self, spent: Mapping[str, Spent]) -> dict[str, float]:
        return {f"ours_against_{name}": self._ratio(spent, name) for name in ("peft", "merged")}

    def _ratio(self, spent: Mapping[str, Spent], other: str) -> float:
        """How many times as long the other takes."""
        if self._device.type == "cpu":
            return spent[other].cpu_s / spent["ours"].cpu_s
        return spent[other].wall_s / spent["ours"].wall_s

    def _prompts(self, count: int, tokens: int | None = None) -> list[list[int]]:
        rng = np.random.default_rng(0)
        shape = (count, tokens or self._load.prompt_tokens)
        return rng.integers(0, self._definition.model.vocab_size, shape).tolist()
