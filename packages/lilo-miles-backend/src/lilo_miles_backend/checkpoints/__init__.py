"""Checkpoints: an adapter's state to published files and back.

`persist_training` and `persist_sampler` are called by ranks with what a capture froze; `load_training` reads back.
Nothing here knows the model that the adapter belongs to, or which slot it was in.
"""

from lilo_miles_backend.checkpoints.load import load_training
from lilo_miles_backend.checkpoints.sampler import persist_sampler
from lilo_miles_backend.checkpoints.training import persist_training

__all__ = ["load_training", "persist_sampler", "persist_training"]
