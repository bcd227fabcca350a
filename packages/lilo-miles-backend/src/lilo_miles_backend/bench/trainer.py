"""The measured trainers: ours through its driver, and Hugging Face + PEFT, on the same weights, rows and targets.

One step is a forward and a backward over the same tokens: of one adapter, or of four that have a quarter of the rows
each. CPU seconds of this process decide, since other programs on the machine take wall time; methods take turns and
the best turn of each counts, so that a disturbance hits none of them alone.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.command import Batch, WorkItem
from lilo_engine.errors import InvalidRequest
from lilo_engine.operations.datum import Datum
from lilo_engine.operations.operation import LoraSpec, ModelId
from lilo_engine.operations.tensor import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from lilo_miles_backend.backend import MilesBackend
from lilo_miles_backend.bench.peer import MODULES
from lilo_miles_backend.bench.sizes import SIZES, Size, definition_of, write_model

LORA_RANK = 16
ADAPTERS = 4

Step = Callable[[], float]
"""Runs one step; its loss."""


def measure(names: tuple[str, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per CPU second of each method at each size.

    Args:
        names: of `SIZES`.
        rounds: turns of each method; the best counts.

    Raises:
        InvalidRequest: PEFT, the peer, is not installed; says what to install.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    report: dict[str, dict[str, float]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="lilo-bench-") as folder:
            report[name] = _size(SIZES[name], Path(folder) / f"bench-{name.lower()}", rounds)
    return report


def _size(size: Size, folder: Path, rounds: int) -> dict[str, float]:
    parameters = write_model(size, folder)
    with contextlib.ExitStack() as stack:
        ours, packed = (_Native(size, folder, stack, pack_models=one) for one in (False, True))
        methods: dict[str, Step] = {
            "hf_peft": _peer(size, folder),
            "one_adapter": lambda: ours.step(1),
            "four_adapters": lambda: ours.step(ADAPTERS),
            "four_adapters_packed": lambda: packed.step(ADAPTERS),
        }
        losses = {name: step() for name, step in methods.items()}  # and warm caches
        best = _best(methods, rounds)
    tokens = size.rows * size.tokens
    speeds = {name: tokens / seconds for name, seconds in best.items()}
    return {
        "parameters": float(parameters),
        "tokens_per_step": float(tokens),
        **{f"{name}_tokens_per_cpu_s": speed for name, speed in speeds.items()},
        "one_adapter_against_hf_peft": speeds["one_adapter"] / speeds["hf_peft"],
        "four_adapters_against_one": speeds["four_adapters"] / speeds["one_adapter"],
        "four_adapters_packed_against_one": speeds["four_adapters_packed"] / speeds["one_adapter"],
        "largest_relative_difference_of_losses": _spread(losses),
    }


def _best(methods: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Fewest CPU seconds of each."""
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(rounds):
        for name, step in methods.items():
            started = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - started)
    return best


def _spread(losses: Mapping[str, float]) -> float:
    """All methods compute one thing: how far the first losses (B is zero) are apart."""
    return (max(losses.values()) - min(losses.values())) / abs(max(losses.values()))


def _ids(size: Size) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(0, size.vocabulary, (size.rows, size.tokens + 1))


class _Native:
    """Our trainer in this process, with resident adapters."""

    def __init__(
        self, size: Size, folder: Path, stack: contextlib.ExitStack, *, pack_models: bool
    ) -> None:
        checkpoints = stack.enter_context(tempfile.TemporaryDirectory(prefix="lilo-bench-"))
        self._backend = MilesBackend(
            BackendConfig(
                definition=definition_of(size, folder, pack_models=pack_models),
                checkpoints_root=checkpoints,
                epoch=1,
            )
        )
        stack.callback(self._backend.close)
        self._models = [ModelId(f"m{index}") for index in range(ADAPTERS)]
        for seed, model_id in enumerate(self._models):
            self._backend.create_adapter(model_id, _spec(seed))
        self._datums = [
            Datum(
                tokens=Tensor.of(row[:-1], "int32"),
                loss_inputs={"target_tokens": Tensor.of(row[1:], "int64")},
            )
            for row in _ids(size)
        ]

    def step(self, adapters: int) -> float:
        """All rows, dealt out to so many adapters."""
        used = self._models[:adapters]
        items = tuple(
            WorkItem(operation_id=model_id, model_id=model_id, datums=tuple(datums))
            for model_id, datums in zip(
                used, (self._datums[index::adapters] for index in range(adapters)), strict=True
            )
        )
        batch = Batch(loss="cross_entropy", config={}, forward_only=False, items=items)
        outputs = self._backend.forward_backward(batch)
        assert all(output.error is None for output in outputs), outputs
        for model_id in used:
            self._backend.drop_gradients(model_id)
        return sum(output.metrics["loss:sum"] for output in outputs)


def _spec(seed: int) -> LoraSpec:
    return LoraSpec(
        lora_rank=LORA_RANK,
        alpha=float(LORA_RANK),
        seed=seed,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
    )


def _peer(size: Size, folder: Path) -> Step:
    """The usual way: a PEFT model, all logits, torch's cross entropy."""
    try:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only the peer needs it
    except ImportError as error:
        raise InvalidRequest(
            "the peer of this measurement, PEFT, is not installed: pip install 'lilo-miles-backend[bench]'"
        ) from error
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=list(MODULES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own about tied embeddings
        model: Any = get_peft_model(base, config)
    ids = torch.from_numpy(_ids(size))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step
