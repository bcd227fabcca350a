"""Two hosts on one machine, each with Ray's processes of its own; used by tests and proofs of several nodes.

Where the kernel lets us (root), a host is a network namespace, joined to the other by a link that can be cut; this
process then stands on the first host, as `lilo serve` would. Elsewhere both hosts are this machine: two raylets, whose
nodes differ in all but the link. They have one hostname in either case, and identities of their own (`MODAL_TASK_ID`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
START_LIMIT_S = 150.0
STOP_LIMIT_S = 30.0
_CLONE_NEWNET = 0x40000000
_NETWORK = "10.77.9"


@dataclass
class Host:
    """One host."""

    name: str
    address: str
    namespace: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a session of its own; its output is appended to `log`."""
        prefix = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        with log.open("ab") as output:
            return subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, **variables},
                start_new_session=True,
                cwd=REPOSITORY,
            )

    def cut(self, *, down: bool = True) -> None:
        """Take its link down, or up again; nobody is told."""
        assert self.namespace, "only namespaces have a link of their own"
        state = "down" if down else "up"
        _ip("-n", self.namespace, "link", "set", self.namespace, state)


@dataclass
class Cluster:
    """A Ray cluster over hosts, through `lilo cluster`."""

    hosts: tuple[Host, ...]
    folder: Path
    port: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{self.port}"

    def start_head(self, cpus: int) -> None:
        """Returns when others can join."""
        host = self.hosts[0]
        self._start(
            host, ["head", "--address", host.address, "--port", str(self.port), "--cpus", str(cpus)]
        )
        self._wait_for(host, b"the head of a cluster is at")

    def start_join(self, host: Host, cpus: int, *, wait: bool = True) -> None:
        """Have a host join; returns when it has, if waited for."""
        self._start(
            host, ["join", "--head", self.address, "--address", host.address, "--cpus", str(cpus)]
        )
        if wait:
            self.wait_joined(host)

    def wait_joined(self, host: Host) -> None:
        self._wait_for(host, b"lends its devices")

    def log(self, host: Host) -> Path:
        return self.folder / f"{host.name}.log"

    def stop(self, host: Host) -> None:
        """As SIGTERM does, and Ctrl-C."""
        end(self.running.pop(host.name))

    def kill_ray(self, host: Host) -> list[int]:
        """SIGKILL of the raylet of a host, as when a machine loses its power; the numbers of what was killed."""
        import psutil

        tree = psutil.Process(self.running[host.name].pid).children(recursive=True)
        raylets = [one for one in tree if "raylet/raylet" in " ".join(one.cmdline()[:1])]
        assert raylets, f"{host.name} has no raylet among {[one.name() for one in tree]}"
        for raylet in raylets:
            raylet.kill()
        return [raylet.pid for raylet in raylets]

    def _start(self, host: Host, words: Sequence[str]) -> None:
        program = str(Path(sys.executable).parent / "lilo")
        self.log(host).touch()
        self.log(host).write_bytes(b"")
        self.running[host.name] = host.run([program, "cluster", *words], self.log(host))

    def _wait_for(self, host: Host, words: bytes) -> None:
        end_s = time.monotonic() + START_LIMIT_S
        while words not in self.log(host).read_bytes():
            code = self.running[host.name].poll()
            if code is not None or time.monotonic() > end_s:
                text = self.log(host).read_text("utf-8", "replace")
                raise RuntimeError(f"{host.name} (code {code}) did not say {words!r}:\n{text}")
            time.sleep(0.05)


def namespaces_refused() -> str | None:
    """Why hosts cannot be namespaces here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        _ip("netns", "add", "lilo-probe")
        _ip("netns", "del", "lilo-probe")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"`ip netns` does not work here: {error}"
    return None


@contextmanager
def two_hosts(*, apart: bool) -> Iterator[tuple[Host, Host]]:
    """Two hosts: namespaces if `apart`, in the first of which this thread stands meanwhile."""
    if not apart:
        yield _host(0, "127.0.0.1"), _host(1, "127.0.0.1")
        return
    mark = f"{os.getpid() % 100_000:x}"
    names = [f"lilo{mark}{letter}" for letter in "ab"]
    with ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        _ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        undo.enter_context(_standing_in(names[0]))
        yield _host(0, f"{_NETWORK}.1", names[0]), _host(1, f"{_NETWORK}.2", names[1])


@contextmanager
def cluster(hosts: tuple[Host, ...]) -> Iterator[Cluster]:
    """A cluster over hosts, with nothing started yet; whatever runs of it is ended."""
    with tempfile.TemporaryDirectory(prefix="lilo-hosts-") as folder:
        found = Cluster(hosts=hosts, folder=Path(folder), port=_free_port(hosts[0].address))
        try:
            yield found
        finally:
            for running in list(found.running.values())[::-1]:
                end(running)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL of its session when that does not help."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _host(number: int, address: str, namespace: str | None = None) -> Host:
    name = f"host-{number}"
    variables = {"MODAL_TASK_ID": name, "PYTHONPATH": str(REPOSITORY)}
    return Host(name=name, address=address, namespace=namespace, environment=variables)


@contextmanager
def _standing_in(namespace: str) -> Iterator[None]:
    """Move this thread, and all that it starts, into a namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    inside = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        _set_namespace(inside)
        yield
    finally:
        _set_namespace(before)
        os.close(before)
        os.close(inside)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
