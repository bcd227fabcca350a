"""Batches: one RunBatch on one rank: its items as passes, and their outputs over all data-parallel ranks.

Every rank gets the whole batch. What is wrong with an item is found before anything is exchanged, from the same data
and so alike on all ranks; a loss that is not finite is seen by the ranks that computed it and told to their
data-parallel neighbours at the end, so that all drop the same gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lilo_definitions import Definition
from lilo_engine.commands.command import Batch, Output, WorkItem
from lilo_engine.errors import LiloError
from lilo_engine.operations.tensor import Tensor

from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.collectives import Axis, collected, sum_in_place
from lilo_miles_backend.ranks.forward_backward import Part, PartResult, PassLimits, run_pass
from lilo_miles_backend.ranks.losses import Objective
from lilo_miles_backend.ranks.microbatch import Layout
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.residents import Residents
from lilo_miles_backend.ranks.rows import Array, assert_checked, make_row

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One item on its way: a part, and then what became of it."""

    item: WorkItem
    part: Part | None = None
    """None: it was refused before the pass."""
    result: PartResult | None = None
    """None until it ran."""
    error: str | None = None


class BatchRunner:
    """Runs the batches of one rank."""

    def __init__(
        self,
        definition: Definition,
        model: BaseModel,
        residents: Residents,
        moved: Callable[[], None],
    ) -> None:
        """Run batches on this model; `moved` is called after each microbatch."""
        self._definition = definition
        self._model = model
        self._residents = residents
        self._moved = moved
        self._parallel = model.parallel
        topology, limits = definition.topology, definition.limits
        self._packs_models = definition.trainer.pack_models
        layout = Layout(
            alignment=Alignment.of(topology, sequence_parallel=False),
            cp_rank=self._parallel.cp.rank,
            cp_size=self._parallel.cp.size,
            packed=self._parallel.cp.is_split or self._packs_models,
        )
        self.limits = PassLimits(
            max_tokens=limits.max_tokens_per_rank,
            chunk_tokens=limits.logprob_chunk_tokens,
            layout=layout,
        )

    def run(self, batch: Batch) -> list[Output]:
        """One output per item, in order; an item's failure stays its own and leaves no half-added gradients."""
        objective = Objective.of(batch.loss, batch.config)
        runs = [self._prepared(item, objective) for item in batch.items]
        ready = [run for run in runs if run.part is not None]
        # Rows of several models share microbatches only where the definition says so.
        for together in [ready] if self._packs_models and ready else [[run] for run in ready]:
            self._run(together, objective, forward_only=batch.forward_only)
        ran = [run for run in runs if run.result is not None]
        found = _over_ranks(ran, self._parallel.dp, self._model.device.torch_device)
        if not batch.forward_only:
            self._settle(runs)
        outputs = {id(run): output for run, output in zip(ran, found, strict=True)}
        return [
            outputs[id(run)]
            if run.error is None
            else Output(operation_id=run.item.operation_id, error=run.error)
            for run in runs
        ]

    def _prepared(self, item: WorkItem, objective: Objective) -> _Run:
        try:
            assert_checked(
                item.datums,
                objective.name,
                vocab_size=self._definition.model.vocab_size,
                context=self._definition.context,
            )
            for datum in item.datums:
                self.limits.layout.alignment.padded(datum.num_tokens)
            rows = [make_row(datum) for datum in item.datums]
            adapter = self._residents.adapter(item.model_id)
        except Exception as error:  # isolates one client from another: the others' items go on
            return _Run(item=item, error=_sentence(item, error))
        return _Run(item=item, part=Part(adapter=adapter, rows=rows))

    def _run(self, runs: Sequence[_Run], objective: Objective, *, forward_only: bool) -> None:
        try:
            results = run_pass(
                self._model,
                [run.part for run in runs if run.part is not None],
                objective,
                self.limits,
                forward_only=forward_only,
                moved=self._moved,
            )
        except Exception as error:
            if self._parallel.world_size > 1:
                raise  # the other ranks may be waiting in a collective: nothing here can be trusted to go on
            for run in runs:  # isolates one client from another: the others' items go on
                run.error = _sentence(run.item, error)
            return
        for run, result in zip(runs, results, strict=True):
            run.result = result

    def _settle(self, runs: Sequence[_Run]) -> None:
        """Count the passes of each model, or drop the window of one that failed: it may be half-added."""
        failed = {run.item.model_id for run in runs if run.error is not None}
        for model_id in {run.item.model_id for run in runs if run.item.model_id in self._residents}:
            adapter = self._residents.adapter(model_id)
            if model_id in failed:
                adapter.drop_gradients()
            else:
                adapter.num_passes += sum(run.item.model_id == model_id for run in runs)


def _over_ranks(runs: Sequence[_Run], dp: Axis, device: torch.device) -> list[Output]:
    """Outputs of whole items; fails those that failed on any data-parallel rank."""
    if not runs:
        return []
    told = [[(result.loss, result.padded_tokens, result.failure) for result in _results(runs)]]
    logprobs = [_own_rows(run) for run in runs]
    if dp.is_split:
        told = collected(told[0], dp)
        logprobs = _all_rows(runs, dp, device)
    outputs: list[Output] = []
    for index, run in enumerate(runs):
        here = [rank[index] for rank in told]
        run.error = next((failure for _, _, failure in here if failure), None)
        tokens = sum(datum.num_tokens for datum in run.item.datums)
        outputs.append(
            Output(
                operation_id=run.item.operation_id,
                logprobs=logprobs[index],
                metrics={
                    "loss:sum": sum(loss for loss, _, _ in here),
                    "tokens:sum": float(tokens),
                    "padded_tokens:sum": float(sum(padded for _, padded, _ in here)),
                },
            )
        )
    return outputs


def _results(runs: Sequence[_Run]) -> list[PartResult]:
    return [run.result for run in runs if run.result is not None]


def _own_rows(run: _Run) -> tuple[Tensor, ...]:
    assert run.result is not None, "only items that ran have outputs"
    return tuple(Tensor.of(values, "float32") for _, values in sorted(run.result.logprobs.items()))


def _all_rows(runs: Sequence[_Run], dp: Axis, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Logprobs of all rows: each rank fills in its own, the rest is zero, and the sum is everybody's."""
    shapes = [[row.target_shape for row in run.part.rows] for run in runs if run.part is not None]
    sizes = [int(np.prod(shape)) for item in shapes for shape in item]
    flat = np.zeros(sum(sizes), dtype=np.float32)
    places = iter(np.split(flat, np.cumsum(sizes)[:-1]))
    per_item = [[next(places) for _ in item] for item in shapes]
    for result, item in zip(_results(runs), per_item, strict=True):
        for row, values in result.logprobs.items():
            item[row][:] = values.reshape(-1)
    summed: Array = sum_in_place(torch.from_numpy(flat).to(device), dp).cpu().numpy()
    places = iter(np.split(summed, np.cumsum(sizes)[:-1]))
    return [
        tuple(Tensor.of(next(places).reshape(shape), "float32") for shape in item)
        for item in shapes
    ]


def _sentence(item: WorkItem, error: Exception) -> str:
    if isinstance(error, LiloError):
        return str(error)
    _log.exception("model %s operation %s failed", item.model_id, item.operation_id)
    return f"the pass failed with {type(error).__name__}: {error}"
