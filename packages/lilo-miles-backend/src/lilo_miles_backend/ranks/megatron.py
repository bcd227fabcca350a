"""The one place that imports megatron-core: every other module takes Megatron's names from here.

Importing Megatron without its optional CUDA parts (TransformerEngine, apex) warns about each of them: about fused
kernels that nothing here uses, since attention, norms and rotary embeddings are our own. The filter holds for these
imports alone; it can go when Megatron stops warning on import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "GPTModel",
    "ModuleSpec",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "building",
    "get_cuda_rng_tracker",
    "parallel_state",
]


@contextmanager
def building() -> Iterator[None]:
    """Hold back what Megatron says of itself while a model is built.

    Its local layer spec does not hand the feed-forward size to its own MLP, which then warns that it reads it from the
    configuration; that cannot be avoided from outside.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="megatron", category=DeprecationWarning)
        yield
