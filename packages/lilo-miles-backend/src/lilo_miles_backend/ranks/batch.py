"""Batches: one RunBatch on one rank: its items as passes, and their outputs over all ranks.

Every rank gets the whole batch. What is wrong with an item is found before anything is exchanged, from the same data
and so alike on all ranks; a loss that is not finite is seen in the sum over the ranks, so that all drop the same gradients.
The host waits for the device once, when all passes are queued.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lilo_definitions import Definition, architecture_of
from lilo_engine.commands.command import Batch, Output, WorkItem
from lilo_engine.errors import LiloError

from lilo_miles_backend.ranks.alignment import Alignment
from lilo_miles_backend.ranks.answers import Answer, Answers
from lilo_miles_backend.ranks.dtype import compute_dtype
from lilo_miles_backend.ranks.forward_backward import Part, PassLimits, run_pass
from lilo_miles_backend.ranks.levels import LayerLevels
from lilo_miles_backend.ranks.losses import Objective
from lilo_miles_backend.ranks.memory import DeviceMemory
from lilo_miles_backend.ranks.microbatch import Layout
from lilo_miles_backend.ranks.model import BaseModel
from lilo_miles_backend.ranks.report import RanPass, Report
from lilo_miles_backend.ranks.residents import Residents
from lilo_miles_backend.ranks.rows import Row, assert_checked, make_row
from lilo_miles_backend.ranks.work import Work

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One item on its way: a part, and then what became of it."""

    item: WorkItem
    rows: Sequence[Row] = ()
    part: Part | None = None
    """None: it was refused before the pass."""
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
        self._packs_models = definition.trainer.pack_models
        topology, limits = definition.topology, definition.limits
        cp, device = self._parallel.cp, model.device.torch_device
        work = Work.of(architecture_of(definition))
        memory = DeviceMemory(device, compute_dtype(definition))
        levels = LayerLevels(definition, memory, self._parallel.world)
        # Kernels of a GPU and its allocator are reused for streams of equal length; a CPU's have nothing to reuse.
        buckets = device.type != "cpu"
        self.limits = PassLimits(
            max_tokens=limits.max_tokens_per_rank,
            chunk_tokens=limits.logprob_chunk_tokens,
            layout=Layout(
                alignment=Alignment.of(topology, sequence_parallel=False),
                cp_rank=cp.rank,
                cp_size=cp.size,
                bucket_tokens=limits.max_tokens_per_rank * cp.size if buckets else None,
            ),
            levels=levels.of,
            cost=work.cost,
        )
        self.pass_bytes = levels.pass_bytes
        """Most that a pass is planned to take beside what this rank holds throughout; None on CPU."""
        self._report = Report(
            device=device,
            parallel=self._parallel,
            memory=memory,
            levels=levels,
            work=work,
            max_tokens=self.limits.max_tokens,
        )

    def run(self, batch: Batch) -> list[Output]:
        """One output per item, in order; an item's failure stays its own and leaves no half-added gradients."""
        objective = Objective.of(batch.loss, batch.config)
        self._report.begin()
        runs = [self._prepared(item, objective) for item in batch.items]
        ready = [run for run in runs if run.error is None]
        answers = Answers(
            [[row.target_shape for row in run.rows] for run in ready],
            self._model.device.torch_device,
            self._parallel.dp_cp,
        )
        for place, run in enumerate(ready):
            adapter = self._residents.adapter(run.item.model_id)
            run.part = Part(item=place, adapter=adapter, rows=run.rows)
        # Rows of several models share microbatches only where the definition says so.
        together = [ready] if self._packs_models and ready else [[run] for run in ready]
        passes = [self._run(one, objective, answers, batch.forward_only) for one in together]
        found = answers.collect() if ready else []
        for run, answer in zip(ready, found, strict=True):
            run.error = run.error or _failure(answer)
        if not batch.forward_only:
            self._settle(runs)
        metrics = self._report.metrics(
            [one for one in passes if one is not None],
            [answer.loss for answer in found],
            forward_only=batch.forward_only,
        )
        return [_output(run, found, metrics) for run in runs]

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
            self._residents.adapter(item.model_id)
        except Exception as error:  # isolates one client from another: the others' items go on
            return _Run(item=item, error=_sentence(item, error))
        return _Run(item=item, rows=rows)

    def _run(
        self, runs: Sequence[_Run], objective: Objective, answers: Answers, forward_only: bool
    ) -> RanPass | None:
        start = self._report.now()
        parts = [run.part for run in runs if run.part is not None]
        try:
            size = run_pass(
                self._model,
                parts,
                objective,
                self.limits,
                answers,
                forward_only=forward_only,
                moved=self._moved,
            )
        except Exception as error:
            if self._parallel.world_size > 1:
                raise  # the other ranks may be waiting in a collective: nothing here can be trusted to go on
            for run in runs:  # isolates one client from another: the others' items go on
                run.error = _sentence(run.item, error)
            return None
        return RanPass(parts=parts, size=size, start=start, end=self._report.now())

    def _settle(self, runs: Sequence[_Run]) -> None:
        """Count the passes of each model, or drop the window of one that failed: it may be half-added."""
        failed = {run.item.model_id for run in runs if run.error is not None}
        for model_id in {run.item.model_id for run in runs if run.item.model_id in self._residents}:
            adapter = self._residents.adapter(model_id)
            if model_id in failed:
                adapter.drop_gradients()
            else:
                adapter.num_passes += sum(run.item.model_id == model_id for run in runs)


def _output(
    run: _Run, found: Sequence[Answer], metrics: Mapping[int, Mapping[str, float]]
) -> Output:
    operation_id = run.item.operation_id
    if run.error is not None or run.part is None:
        return Output(operation_id=operation_id, error=run.error)
    place = run.part.item
    return Output(operation_id=operation_id, logprobs=found[place].logprobs, metrics=metrics[place])


def _sentence(item: WorkItem, error: Exception) -> str:
    if isinstance(error, LiloError):
        return str(error)
    _log.exception("model %s operation %s failed", item.model_id, item.operation_id)
    return f"the pass failed with {type(error).__name__}: {error}"


def _failure(answer: Answer) -> str | None:
    """Why nothing of an item may reach an optimizer."""
    if math.isfinite(answer.loss):
        return None
    return (
        f"the loss of this request is {answer.loss}, so none of its gradients are used; look for huge "
        "weights, advantages or logprobs, or for an earlier step with too large a learning rate"
    )
