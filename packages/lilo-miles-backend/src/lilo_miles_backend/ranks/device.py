"""Device: where this rank computes and what its collectives travel over; chosen once, at start.

Everything else takes a `Device`; nothing else names `cuda` or a communication backend.

Numbers on a GPU: float32 is multiplied as float32 (no tf32), and products of bfloat16 are summed in float32 from the
first term to the last (cuBLAS may otherwise round the parts of a long sum to bfloat16 before it adds them up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from lilo_definitions import Topology
from lilo_engine.errors import InvalidRequest

from lilo_miles_backend.config import allocate_in_segments

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's device."""

    torch_device: torch.device
    collectives: Literal["gloo", "nccl"]
    """The torch.distributed backend."""
    description: str
    """For people, equal on equal devices: `cpu (1 thread)`, `NVIDIA H200 (140 GiB)`."""

    @classmethod
    def of(cls, topology: Topology, *, threads: int, local_rank: int, num_devices: int) -> Device:
        """What a definition's topology asks for.

        Args:
            topology: of the definition.
            threads: torch threads of this process.
            local_rank: which of the GPUs that this process sees.
            num_devices: how many it must see.

        Raises:
            InvalidRequest: there are fewer.
        """
        if topology.device == "cpu":
            return cls.cpu(threads=threads)
        return cls.gpu(local_rank, num_devices=num_devices, threads=threads)

    @classmethod
    def cpu(cls, *, threads: int) -> Device:
        """The CPU, with `threads` torch threads for this process."""
        torch.set_num_threads(threads)
        plural = "" if threads == 1 else "s"
        return cls(
            torch_device=torch.device("cpu"),
            collectives="gloo",
            description=f"cpu ({threads} thread{plural})",
        )

    @classmethod
    def gpu(cls, local_rank: int, *, num_devices: int = 1, threads: int = 1) -> Device:
        """One of the GPUs that this process sees, which becomes its current one.

        Raises:
            InvalidRequest: it sees fewer than `num_devices`; says how many, and what to do.
        """
        require_gpus(num_devices)
        torch.set_num_threads(threads)
        allocate_in_segments()
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        found = torch.cuda.get_device_properties(device)
        return cls(
            torch_device=device,
            collectives="nccl",
            description=f"{found.name} ({found.total_memory / GIB:.0f} GiB)",
        )

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_device.type == "cuda"

    def memory_left(self) -> int | None:
        """Bytes that this process could still allocate; None on CPU, where nothing is planned by it."""
        if not self.is_cuda:
            return None
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return free + reserved - torch.cuda.memory_allocated(self.torch_device)

    def synchronize(self) -> None:
        """Wait for what was started."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)


def require_gpus(number: int) -> None:
    """Check that this process sees so many.

    Raises:
        InvalidRequest: it sees fewer; says how many, and what to do.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= number:
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built for the CPU; install the build for CUDA"
    elif found == 0:
        why = "its driver shows none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    else:
        why = "lower gpus_per_node with tp, cp or dp, or check CUDA_VISIBLE_DEVICES"
    needed = "a GPU" if number == 1 else f"{number} GPUs"
    raise InvalidRequest(
        f"the definition's topology.device is cuda and needs {needed} on this machine, and {found} can be used: {why}, "
        "or take a definition for cpu (`lilo definitions list`)"
    )
