"""Bring-up: from containers to one Ray cluster: the head starts it, the others join, lend their GPUs, and end with it.

Ray is reached through its command line, since this package does not import it. Whether enough GPUs have come is for
the trainer to wait for, which knows how many it needs.

    head    waits for: nothing                          then serves
    worker  waits for: the head's port (HEAD_LIMIT_S)    then joins, and looks for the head every LOOK_S
"""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lilo_engine.deploy.cluster import Cluster
from lilo_engine.deploy.places import RAY_PORT
from lilo_engine.errors import ServerError

_log = logging.getLogger(__name__)

INTERFACE = "eth0"
"""The provider's private network between containers of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Waits of a bring-up, in seconds."""

    command_s: float = 300.0
    """For one `ray` command: the first of a container reads Ray from a cold disk; 92 s were seen on two busy cores."""
    head_s: float = 600.0
    """For the head's port to open: the containers of a cluster start minutes apart."""
    joins: int = 30
    """Tries of a worker to join; the head's port opens a little before it takes nodes."""
    between_joins_s: float = 2.0
    look_s: float = 2.0
    """Between looks for the head: a worker ends within 10 s of it."""
    misses: int = 3
    """Looks in a row that fail before the head counts as gone: one lost packet must not end a run."""
    connect_s: float = 1.0
    """For one look."""


class Commands(Protocol):
    """What runs `ray`."""

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> int:
        """Run to its end; the exit code."""
        ...


def run_command(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> int:
    """Run a command with variables added to ours.

    Raises:
        ServerError: it is not installed, or did not end in time.
    """
    words = " ".join(command[:2])
    try:
        # env(1) adds to what this process has; only config.py reads that.
        given = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        return subprocess.run(
            given, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"`{words}` did not end within {timeout_s:g} s") from error


def environment_of(cluster: Cluster) -> Mapping[str, str]:
    """Variables that every process of a cluster gets, by name."""
    direct = ",".join(dict.fromkeys(("localhost", "127.0.0.1", cluster.own, cluster.head)))
    return {
        "no_proxy": direct,
        "NO_PROXY": direct,
        "MASTER_ADDR": cluster.head,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "RAY_ADDRESS": f"{cluster.head}:{RAY_PORT}",
        # A node that answers nothing for 50 s is lost; Ray's own limits take minutes to say so.
        "RAY_health_check_period_ms": "5000",
        "RAY_health_check_failure_threshold": "10",
    }


def head_command(cluster: Cluster, port: int = RAY_PORT) -> tuple[str, ...]:
    """What the head runs."""
    address = f"--node-ip-address={cluster.own}"
    return ("ray", "start", "--head", address, f"--port={port}", "--disable-usage-stats")


def join_command(cluster: Cluster, port: int = RAY_PORT) -> tuple[str, ...]:
    """What every other container runs."""
    where = f"--address={cluster.head}:{port}"
    return ("ray", "start", where, f"--node-ip-address={cluster.own}", "--disable-usage-stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class BringUp:
    """Brings one container into its cluster."""

    cluster: Cluster
    commands: Commands = run_command
    limits: Limits = Limits()
    port: int = RAY_PORT

    def start_head(self) -> None:
        """Start the cluster on this container; returns when others can join.

        Raises:
            ServerError: Ray did not start, or its port stays closed.
        """
        self._run(head_command(self.cluster, self.port), "start the head")
        if not self._wait_for_head(self.limits.command_s):
            raise ServerError(
                f"ray started, but {self.cluster.head}:{self.port} takes no connection after {self.limits.command_s:g} s"
            )

    def lend(self) -> None:
        """Join, and return when the head is gone: this container has nothing else to do.

        Raises:
            ServerError: the head never came, or did not let this container join.
        """
        if not self._wait_for_head(self.limits.head_s):
            raise ServerError(
                f"the head {self.cluster.head}:{self.port} did not come within {self.limits.head_s:g} s; "
                "look at the log of container 0"
            )
        self._join()
        _log.info("container %d joined %s", self.cluster.rank, self.cluster.head)
        misses = 0
        while misses < self.limits.misses:
            time.sleep(self.limits.look_s)
            misses = 0 if self._head_answers() else misses + 1
        _log.info("the head is gone; container %d ends", self.cluster.rank)
        self.stop()

    def stop(self) -> None:
        """End Ray's processes here; nothing to end is no error."""
        self.commands(("ray", "stop", "--force"), {}, self.limits.command_s)

    def _join(self) -> None:
        for _ in range(self.limits.joins):
            code = self.commands(
                join_command(self.cluster, self.port),
                environment_of(self.cluster),
                self.limits.command_s,
            )
            if code == 0:
                return
            time.sleep(self.limits.between_joins_s)
        raise ServerError(
            f"container {self.cluster.rank} could not join {self.cluster.head}:{self.port} in "
            f"{self.limits.joins} tries; look at its log"
        )

    def _run(self, command: Sequence[str], what: str) -> None:
        code = self.commands(command, environment_of(self.cluster), self.limits.command_s)
        if code != 0:
            raise ServerError(f"could not {what}: `{' '.join(command)}` exited with code {code}")

    def _wait_for_head(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not self._head_answers():
            if time.monotonic() > end:
                return False
            time.sleep(min(self.limits.look_s, 0.5))
        return True

    def _head_answers(self) -> bool:
        try:
            with socket.create_connection(
                (self.cluster.head, self.port), timeout=self.limits.connect_s
            ):
                return True
        except OSError:
            return False
