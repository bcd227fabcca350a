"""Config: the only reader of the environment in lilo-volume."""

from __future__ import annotations

import functools
import importlib
import os
import sys
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
    return f"{host_name()}-{boot_id() or _hardware_id()}"


def host_name() -> str:
    """The name of this machine or container; not unique."""
    if sys.platform == "win32":
        return os.environ.get("COMPUTERNAME", "windows")
    return os.uname().nodename


@functools.cache
def boot_id() -> str:
    """The kernel's boot id, equal for all processes of a machine until it starts anew; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_id() -> int:
    """This process's id, inside its container."""
    return os.getpid()


def _hardware_id() -> str:
    # Not at the top: `uuid` costs a tenth of what importing this package may cost.
    return f"{importlib.import_module('uuid').getnode():012x}"
