"""EmbeddedSampler: the sampling engine that ships with Lilo (`lilo.samplers: embedded`).

The async face of one torch thread. It checks requests, resolves adapter names, and turns bytes into lists and back;
`worker.py` and below generate. The process that hosts it is `lilo_engine.sampling.host`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future

import anyio
import anyio.to_thread
import numpy as np
from lilo_definitions import resolve_source
from lilo_engine.errors import Gone, InvalidRequest, LiloError, NotFound, ServerError, Unavailable
from lilo_engine.sampling.engine import (
    SamplerConfig,
    SampleRequest,
    SampleResult,
    SamplerHealth,
    SamplerInfo,
)
from lilo_engine.sampling.validate import check_request

from lilo_miles_backend.ranks.dtype import compute_dtype
from lilo_miles_backend.sampler.adapters import Adapter, read_adapter
from lilo_miles_backend.sampler.batch import Batch
from lilo_miles_backend.sampler.device import cache_limit, choose_device
from lilo_miles_backend.sampler.model import Model
from lilo_miles_backend.sampler.sequence import Job
from lilo_miles_backend.sampler.text import StopStrings, read_tokenizer
from lilo_miles_backend.sampler.weights import read_base
from lilo_miles_backend.sampler.worker import Worker

_CLOSE_S = 10.0
"""A step takes milliseconds to a few seconds; `close` waits for one."""


class EmbeddedSampler:
    """Implements `lilo_engine.sampling.engine.SamplingEngine`."""

    def __init__(self, config: SamplerConfig, *, num_threads: int = 1) -> None:
        """Load the base model and start the torch thread.

        Args:
            config: names the definition.
            num_threads: of torch. One is the quickest for small models and leaves the machine to the trainer.

        Raises:
            InvalidRequest: the model folder holds something that this sampler does not run, or there is no GPU where
                the definition asks for one.
            ValueError: its vocabulary is not the definition's.
        """
        definition = config.definition
        folder = resolve_source(definition.model.source)
        device = choose_device(definition, threads=num_threads)
        base = read_base(folder, dtype=compute_dtype(definition), device=device)
        if base.shape.vocab_size != definition.model.vocab_size:
            raise ValueError(
                f"definition {definition.name!r} says vocab_size {definition.model.vocab_size}, "
                f"{folder} has {base.shape.vocab_size}"
            )
        self._tokenizer = read_tokenizer(folder)
        self._base = base
        self._context = definition.context
        self._adapters: dict[str, Adapter] = {}
        self._max_adapters = definition.sampler.max_adapters
        self._loading = anyio.Lock()
        self._closed = False
        self._info = SamplerInfo(
            base_model=definition.model.name,
            vocab_size=base.shape.vocab_size,
            max_context=definition.context,
            eos_tokens=base.eos_tokens,
            stop_strings=self._tokenizer is not None,
            max_adapters=definition.sampler.max_adapters,
            device=str(base.device),
            pid=os.getpid(),
        )
        model = Model(base)
        model.warm_up()
        batch = Batch(
            model,
            max_rows=definition.sampler.sequences,
            max_length=definition.context,
            cache_bytes=cache_limit(definition, device),
        )
        self._worker = Worker(batch, num_threads=num_threads)

    async def load(self, name: str, folder: str) -> None:
        """Load a PEFT folder under an immutable name; the same pair again does nothing.

        Raises:
            InvalidRequest: the folder is no adapter for this base model, or the name stands for another folder.
            ServerError: as many adapters are loaded as the definition allows.
        """
        async with self._loading:
            held = self._adapters.get(name)
            if held is not None and held.folder == folder:
                return
            if held is not None:
                raise InvalidRequest(
                    f"adapter {name!r} is {held.folder}; names are immutable, load {folder} under another"
                )
            if len(self._adapters) >= self._max_adapters:
                raise ServerError(
                    f"{len(self._adapters)} adapters are loaded, the definition allows {self._max_adapters}; "
                    "unload one first"
                )
            self._adapters[name] = await anyio.to_thread.run_sync(
                read_adapter, name, folder, self._base
            )

    async def unload(self, name: str) -> None:
        """Forget the name; running requests hold the adapter itself and finish with it."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            self._worker.post(lambda batch: batch.forget_adapter(adapter))

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Generate; cancelling the call frees its rows.

        Raises:
            NotFound: the adapter is not loaded.
            InvalidRequest: prompt or parameters cannot be honoured.
            Gone: the request was aborted.
            CommandFailed: this request failed; others go on.
        """
        if self._closed:
            raise Unavailable("the sampler is closed; try again when it is back")
        future: Future[SampleResult] = Future()
        # From here on the future cannot be cancelled under the torch thread, only by its abort.
        future.set_running_or_notify_cancel()
        job = self._job(request, _deliver_to(future))
        self._worker.post(lambda batch: batch.submit(job))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._worker.post(
                lambda batch: batch.abort(lambda other: other is job, _aborted(request.request_id))
            )
            raise

    async def abort(self, request_id: str) -> None:
        """Stop a request; its `sample` raises `Gone`. Unknown ids are no error."""

        def unwanted(job: Job) -> bool:
            return job.request.request_id == request_id

        self._worker.post(lambda batch: batch.abort(unwanted, _aborted(request_id)))

    async def health(self) -> SamplerHealth:
        """Progress of the torch thread."""
        return self._worker.health()

    async def info(self) -> SamplerInfo:
        """What it can do."""
        return self._info

    async def close(self) -> None:
        """End the thread; what still runs fails.

        Raises:
            ServerError: the thread did not end within the limit.
        """
        if self._closed:
            return
        self._closed = True
        if not await anyio.to_thread.run_sync(self._worker.stop, _CLOSE_S):
            raise ServerError(f"the sampler thread did not end within its limit of {_CLOSE_S} s")

    def _job(
        self, request: SampleRequest, deliver: Callable[[SampleResult | LiloError], None]
    ) -> Job:
        check_request(request, vocab_size=self._info.vocab_size, context=self._context)
        prompt = np.frombuffer(request.prompt, dtype="<i4").tolist()
        params = request.params
        adapter = None
        if request.adapter is not None:
            adapter = self._adapters.get(request.adapter)
            if adapter is None:
                raise NotFound(f"adapter {request.adapter!r} is not loaded in this sampler")
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer.json beside the model, there is none; use stop token ids"
            )
        return Job(
            request=request,
            prompt=prompt,
            adapter=adapter,
            # The last token that is drawn is never fed, so it may stand one past the context.
            max_new=min(params.max_tokens, self._context - len(prompt) + 1),
            stop_strings=StopStrings(self._tokenizer, params.stop_strings)
            if params.stop_strings and self._tokenizer is not None
            else None,
            deliver=deliver,
        )


def _aborted(request_id: str) -> Gone:
    return Gone(f"request {request_id} was aborted; send it again to sample")


def _deliver_to(future: Future[SampleResult]) -> Callable[[SampleResult | LiloError], None]:
    def deliver(outcome: SampleResult | LiloError) -> None:
        if isinstance(outcome, LiloError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    return deliver
