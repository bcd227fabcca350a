"""Config: the only reader of the environment in lilo-volume."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from pathlib import Path


@functools.cache
def node_id() -> str:
    """Which node this process runs on; equal for all its processes, different between nodes.

    A host name alone is useless: containers of one cluster may all have the same. So the first of: the task id
    of the container, the id that the cluster gives NCCL, the host name with the kernel's boot id.
    """
    for variable in ("MODAL_TASK_ID", "NCCL_HOSTID"):
        if value := os.environ.get(variable):
            return value
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = f"{uuid.getnode():012x}"
    return f"{socket.gethostname()}-{boot}"
