"""The embedded sampling engine: a small batched sampler that generates with many adapters at once.

The path of a request inside it: `embedded.py` (async face) -> `worker.py` (the one torch thread) -> `batch.py`
(who generates together) -> `model.py` (numbers) -> `draw.py` and `logprobs.py` (tokens) -> `embedded.py` (bytes).
"""

from __future__ import annotations

from lilo_miles_backend.sampler.embedded import EmbeddedSampler

__all__ = ["EmbeddedSampler"]
