"""Bring-up: from machines to one Ray cluster: the head starts it, the others join, lend their devices, end with it.

Whether enough devices have come is for the trainer to wait for, which knows how many it needs.

    head    prepare -> start Ray                              waits for: its own port
    worker  the head's port -> prepare -> start Ray -> idle   waits for: the head, which it looks for every LOOK_S
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lilo_engine.cluster.membership import Cluster
from lilo_engine.cluster.network import interface_of
from lilo_engine.cluster.ray_process import HeldRay, RayProcess, StartRay
from lilo_engine.errors import ServerError

_log = logging.getLogger(__name__)

RAY_PORT = 6379
OBJECT_STORE_BYTES = 256 * 2**20
"""Ray would take a third of the memory; only commands pass through it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Waits of a bring-up, in seconds."""

    start_s: float = 300.0
    """For the head's own port: the first start reads Ray from a cold disk; 92 s were seen on two busy cores."""
    head_s: float = 600.0
    """For the head's port to open: machines of a cluster start minutes apart."""
    joins: int = 30
    """Tries of a worker to join; the head's port opens a little before it takes nodes."""
    between_joins_s: float = 2.0
    look_s: float = 1.5
    """Between looks for the head: a worker ends within 10 s of it, misses and Ray's end included."""
    misses: int = 3
    """Looks in a row that fail before the head counts as gone: one lost packet must not end a run."""
    connect_s: float = 1.0
    """For one look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How soon Ray takes a machine for lost that answers nothing; its own limits take minutes."""

    period_ms: int = 1000
    timeout_ms: int = 2000
    misses: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a machine lends; None: all it has."""

    cpus: int | None = None
    gpus: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """As options of `ray start`."""
        given = (("--num-cpus", self.cpus), ("--num-gpus", self.gpus))
        return tuple(f"{name}={number}" for name, number in given if number is not None)


def environment_of(
    cluster: Cluster, port: int = RAY_PORT, health: Health | None = None
) -> Mapping[str, str]:
    """Variables that every process of a cluster gets on this machine, by name."""
    health = health or Health()
    direct = ",".join(dict.fromkeys(("localhost", "127.0.0.1", *cluster.addresses)))
    found = {
        # gRPC would send what is meant for the next machine to a proxy.
        "no_proxy": direct,
        "NO_PROXY": direct,
        "MASTER_ADDR": cluster.head,
        "RAY_ADDRESS": f"{cluster.head}:{port}",
        "LILO_RAY_ADDRESS": f"{cluster.head}:{port}",
        "RAY_health_check_initial_delay_ms": str(health.period_ms),
        "RAY_health_check_period_ms": str(health.period_ms),
        "RAY_health_check_timeout_ms": str(health.timeout_ms),
        "RAY_health_check_failure_threshold": str(health.misses),
        # Workers that nobody asked for would be started for every core.
        "RAY_num_prestart_python_workers": "0",
        "RAY_prestart_worker_first_driver": "0",
    }
    # Names of interfaces differ between machines; a wrong one is an error, none leads to time-outs.
    if interface := interface_of(cluster.own):
        found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return found


def head_command(
    cluster: Cluster, port: int = RAY_PORT, devices: Devices | None = None
) -> tuple[str, ...]:
    """What the head runs."""
    return (
        "ray",
        "start",
        "--head",
        f"--port={port}",
        "--include-dashboard=false",
        *_common(cluster, devices),
    )


def join_command(
    cluster: Cluster, port: int = RAY_PORT, devices: Devices | None = None
) -> tuple[str, ...]:
    """What every other machine runs."""
    return ("ray", "start", f"--address={cluster.head}:{port}", *_common(cluster, devices))


def _common(cluster: Cluster, devices: Devices | None) -> tuple[str, ...]:
    return (
        f"--node-ip-address={cluster.own}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        # Any free ports: two machines may share one address space, as containers of a host do.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--disable-usage-stats",
        "--block",
        *(devices or Devices()).words,
    )


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class BringUp:
    """Brings one machine into its cluster."""

    cluster: Cluster
    start: StartRay = HeldRay
    limits: Limits = Limits()
    health: Health = Health()
    devices: Devices = Devices()
    port: int = RAY_PORT
    prepare: Callable[[], None] = _nothing
    """Called before Ray starts here: on the head to fetch what all need, elsewhere to see it once the head has it."""

    def start_head(self) -> RayProcess:
        """Start the cluster on this machine; returns when others can join. The caller stops it.

        Raises:
            ServerError: Ray did not start, or its port stays closed.
        """
        if self._head_answers():
            raise ServerError(
                f"something listens at {self.cluster.head}:{self.port} already; stop it, or choose another port"
            )
        self.prepare()
        command = head_command(self.cluster, self.port, self.devices)
        ray = self._start(command)
        end = time.monotonic() + self.limits.start_s
        while not (ray.has_started() and self._head_answers()):
            code = ray.exit_code()
            if code is not None or time.monotonic() > end:
                ray.stop()
                words = " ".join(command)
                raise ServerError(
                    f"could not start the head: `{words}` "
                    + (
                        f"exited with code {code}"
                        if code is not None
                        else f"takes no connection at {self.cluster.head}:{self.port} after {self.limits.start_s:g} s"
                    )
                )
            time.sleep(min(self.limits.look_s, 0.2))
        return ray

    def lend(
        self, joined: Callable[[], None] = _nothing, stopped: Callable[[], bool] | None = None
    ) -> None:
        """Join, idle, and return when the head is gone.

        Args:
            joined: Called once, when this machine belongs to the cluster.
            stopped: Whether somebody asks it to leave before.

        Raises:
            ServerError: the head never came, did not let this machine join, or Ray ended here by itself.
        """
        if not self._wait_for_head(self.limits.head_s):
            raise ServerError(
                f"the head {self.cluster.head}:{self.port} did not come within {self.limits.head_s:g} s; "
                "look at its log"
            )
        self.prepare()
        for _ in range(self.limits.joins):
            if self._lend_once(joined, stopped or (lambda: False)):
                return
            time.sleep(self.limits.between_joins_s)
        raise ServerError(
            f"machine {self.cluster.rank} could not join {self.cluster.head}:{self.port} in "
            f"{self.limits.joins} tries; look at its log"
        )

    def _lend_once(self, joined: Callable[[], None], stopped: Callable[[], bool]) -> bool:
        """Join and idle; whether it was over in order; False: the head did not take it, and `ray start` ended by itself."""
        started, told, misses = time.monotonic(), False, 0
        ray = self._start(join_command(self.cluster, self.port, self.devices))
        try:
            while misses < self.limits.misses and not stopped():
                time.sleep(self.limits.look_s)
                lived_s = time.monotonic() - started
                misses = 0 if self._head_answers() else misses + 1
                code, has_joined = ray.exit_code(), ray.has_started()
                if code is not None and misses == 0:
                    if not has_joined:
                        return False
                    raise ServerError(
                        f"Ray ended on machine {self.cluster.rank} with code {code} after {lived_s:.0f} s while the "
                        "head still runs; it was taken for lost, or killed: join again"
                    )
                if has_joined and not told:
                    told = True
                    joined()
            _log.info("the head is gone; machine %d ends", self.cluster.rank)
            return True
        finally:
            ray.stop()

    def _start(self, command: Sequence[str]) -> RayProcess:
        try:
            return self.start(command, environment_of(self.cluster, self.port, self.health))
        except OSError as error:
            raise ServerError(f"`{' '.join(command[:2])}` cannot be run: {error}") from error

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
