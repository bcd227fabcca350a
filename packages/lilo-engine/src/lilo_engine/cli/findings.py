"""The findings of `lilo doctor`: one function per question, each answering with `Finding`s.

A finding is good, a note (something optional is missing), or a problem (something will not work), and a problem says
what to do. Nothing here prints.
"""

from __future__ import annotations

import platform
import socket
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias

import lilo_definitions
from lilo_definitions import DefinitionError

from lilo_engine.cli.machine import TRAINER, Machine, obstacles

State: TypeAlias = Literal["good", "note", "problem"]

GIB = 2**30
DISK_WANTED_BYTES = GIB
"""Records, logs and some checkpoints of the smallest model; below it a run ends with a full disk."""
MEMORY_WANTED_BYTES = 2 * GIB
"""Front, trainer and sampler import torch once or twice and load the smallest model: about 1.2 GiB."""
OLDEST_PYTHON = (3, 11)

_PACKAGES: tuple[tuple[str, State, str], ...] = (
    ("lilo-engine", "problem", "pip install lilo-engine"),
    ("lilo-definitions", "problem", "pip install lilo-definitions"),
    ("lilo-volume", "problem", "pip install lilo-volume"),
    (
        "lilo-miles-backend",
        "problem",
        "nothing can train without it: pip install lilo-miles-backend",
    ),
    ("torch", "problem", "pip install lilo-miles-backend brings it"),
    ("megatron-core", "problem", "pip install lilo-miles-backend brings it"),
    ("transformers", "problem", "pip install lilo-miles-backend brings it"),
    ("safetensors", "problem", "pip install lilo-miles-backend brings it"),
    ("ray", "note", "only for trainers on several nodes; pip install lilo-miles-backend brings it"),
    ("tinker", "note", "only for clients and `lilo demo`: pip install 'lilo-engine[demo]'"),
)
"""Distribution, how bad its absence is, and what to do."""

_GPU_PACKAGES: tuple[tuple[str, State, str], ...] = (
    (
        "triton",
        "problem",
        "training on a GPU is slow and needs much more memory without it; torch's build for CUDA brings it",
    ),
    (
        "fla-core",
        "note",
        "only for models with gated delta nets: pip install 'lilo-miles-backend[gpu]'",
    ),
    (
        "flash-attn-4",
        "note",
        "attention is cuDNN's without it; faster on Hopper and later with it: pip install 'lilo-miles-backend[fa4]'",
    ),
)
"""Likewise, where there is a GPU."""

_NEEDED = {
    "lilo.backends": (TRAINER, "lilo-miles-backend"),
    "lilo.samplers": ("embedded", "lilo-miles-backend"),
    "lilo.definitions": ("builtin", "lilo-definitions"),
}
"""Entry-point group -> the entry that a working installation has at least, and the package that brings it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one question."""

    section: str
    subject: str
    state: State
    found: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""


def of_software(*, with_gpu: bool = False) -> list[Finding]:
    """Python and the installed distributions; some are asked for only where there is a GPU."""
    good = sys.version_info >= OLDEST_PYTHON
    python = Finding(
        section="software",
        subject="python",
        state="good" if good else "problem",
        found=f"{platform.python_version()} ({sys.executable})",
        advice="" if good else "use Python 3.11 or later",
    )
    packages = _PACKAGES + _GPU_PACKAGES if with_gpu else _PACKAGES
    return [python, *(_package(*entry) for entry in packages)]


def _package(name: str, absence: State, advice: str) -> Finding:
    """Is this distribution installed?"""
    try:
        return Finding(section="software", subject=name, state="good", found=version(name))
    except PackageNotFoundError:
        return Finding(
            section="software", subject=name, state=absence, found="not installed", advice=advice
        )


def of_machine(machine: Machine) -> list[Finding]:
    """Cores, memory, disk, devices."""
    memory = (
        f"{machine.available_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB available"
    )
    enough_memory = machine.available_bytes >= MEMORY_WANTED_BYTES
    enough_disk = machine.disk_free_bytes >= DISK_WANTED_BYTES
    return [
        Finding(section="machine", subject="cores", state="good", found=str(machine.num_cores)),
        Finding(
            section="machine",
            subject="memory",
            state="good" if enough_memory else "note",
            found=memory,
            advice=""
            if enough_memory
            else "the smallest server takes about 2 GiB; close something",
        ),
        Finding(
            section="machine",
            subject="disk",
            state="good" if enough_disk else "problem",
            found=f"{machine.disk_free_bytes / GIB:.1f} GiB free in {tempfile.gettempdir()}",
            advice="" if enough_disk else "checkpoints need room: free at least 1 GiB",
        ),
        _devices(machine),
    ]


def _devices(machine: Machine) -> Finding:
    """The torch build and what it can compute on."""
    torch = machine.torch
    if torch.error or torch.version is None:
        return Finding(
            section="machine",
            subject="torch",
            state="problem",
            found=torch.error or "not found",
            advice="install torch for this machine, then lilo-miles-backend",
        )
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "built for CPU"
    named = ", ".join(f"{d.name} ({d.memory_bytes / GIB:.0f} GiB)" for d in torch.devices)
    found = f"{torch.version}, {build}; devices: {named or 'CPU'}"
    blind = bool(torch.cuda) and not torch.devices
    advice = "no CUDA device is visible; if there is one, check its driver" if blind else ""
    return Finding(
        section="machine",
        subject="torch",
        state="note" if blind else "good",
        found=found,
        advice=advice,
    )


def of_sockets() -> list[Finding]:
    """Can processes of this machine talk to each other the way a server needs?"""
    return [_unix_socket(), _loopback()]


def _unix_socket() -> Finding:
    """The engine reaches the sampling process through a socket in the folder for temporary files."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lilo-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            listener.bind(str(Path(folder) / "s"))
            listener.listen()
    except (OSError, AttributeError) as error:
        return Finding(
            section="machine",
            subject="unix sockets",
            state="problem",
            found=f"cannot listen in {tempfile.gettempdir()}: {error}",
            advice="set TMPDIR to a short path on a local disk, such as /tmp",
        )
    return Finding(
        section="machine",
        subject="unix sockets",
        state="good",
        found=f"can listen in {tempfile.gettempdir()}",
    )


def _loopback() -> Finding:
    """Clients reach the front over TCP."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            found = "127.0.0.1 answers"
    except OSError as error:
        return Finding(
            section="machine",
            subject="loopback",
            state="problem",
            found=f"127.0.0.1 does not answer: {error}",
            advice="bring up the loopback interface",
        )
    return Finding(section="machine", subject="loopback", state="good", found=found)


def of_plug_ins(machine: Machine) -> list[Finding]:
    """What was found through entry points, what of it does not load, and what is missing."""
    findings: list[Finding] = []
    for group, (needed, package) in _NEEDED.items():
        points = machine.entry_points.get(group, {})
        findings += [_plug_in(group, name, error) for name, error in points.items()]
        if needed not in points:
            findings.append(
                Finding(
                    section="plug-ins",
                    subject=group,
                    state="problem",
                    found=f"{needed} is not installed",
                    advice=f"pip install {package}",
                )
            )
    return findings


def _plug_in(group: str, name: str, error: str | None) -> Finding:
    """Does this one load?"""
    return Finding(
        section="plug-ins",
        subject=group,
        state="problem" if error else "good",
        found=f"{name}: {error}" if error else name,
        advice="reinstall the package that brings it" if error else "",
    )


def of_definitions(machine: Machine) -> list[Finding]:
    """Which definitions would run here, and why the others would not.

    One that cannot run here is a note: it is meant for another machine. That none can run is a problem.
    """
    try:
        names = lilo_definitions.names()
    except DefinitionError as error:
        return [_definition("all", "problem", str(error), "remove the package at fault")]
    findings = [_runnable(name, machine) for name in names]
    if not any(finding.state == "good" for finding in findings):
        findings.append(
            _definition("all", "problem", "none would run here", "see the problems above")
        )
    return findings


def _runnable(name: str, machine: Machine) -> Finding:
    """Would this one run?"""
    try:
        reasons = obstacles(lilo_definitions.get(name), machine)
    except DefinitionError as error:
        return _definition(name, "problem", str(error), "correct it, or remove its package")
    if reasons:
        return _definition(name, "note", "would not run: " + "; ".join(reasons))
    return _definition(name, "good", f"runs here: lilo serve {name}")


def _definition(name: str, state: State, found: str, advice: str = "") -> Finding:
    return Finding(section="definitions", subject=name, state=state, found=found, advice=advice)
