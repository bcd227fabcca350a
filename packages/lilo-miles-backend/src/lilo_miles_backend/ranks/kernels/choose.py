"""Choose: the kernels of a device. The one place that decides between torch's functions and Triton's kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from lilo_miles_backend.ranks.kernels.kernels import Kernels
from lilo_miles_backend.ranks.kernels.reference import REFERENCE

_log = logging.getLogger(__name__)


def kernels_of(device: torch.device) -> Kernels:
    """What layers on this device compute with: Triton's kernels on a GPU, torch's functions elsewhere."""
    if device.type != "cuda":
        return REFERENCE
    if find_spec("triton") is None:
        _log.warning(
            "triton is not installed: norms, adapters and the loss use plain torch on the GPU, which is right but slow "
            "and needs much more memory; install the torch build for CUDA, which brings triton"
        )
        return REFERENCE
    # Only where they run: importing them needs Triton, and takes a second.
    from lilo_miles_backend.ranks.kernels.triton_elementwise import TritonElementwise  # noqa: PLC0415
    from lilo_miles_backend.ranks.kernels.triton_logits import TritonLogits  # noqa: PLC0415
    from lilo_miles_backend.ranks.kernels.triton_lora import TritonLora  # noqa: PLC0415
    from lilo_miles_backend.ranks.kernels.triton_optimizer import TritonOptimizer  # noqa: PLC0415

    return Kernels(
        elementwise=TritonElementwise(),
        lora=TritonLora(),
        logits=TritonLogits(),
        optimizer=TritonOptimizer(),
    )
