"""The provider's side of a run on this machine: addresses are local, the next container is only noted down."""

import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class LocalProvider:
    """What `run_trainer` needs of a provider."""

    client: object = field(default_factory=SimpleNamespace)
    urls: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @contextmanager
    def forward(self, port):
        yield f"http://127.0.0.1:{port}"

    def publish_url(self, app, run, url):
        self.urls[f"{app}/{run}"] = url

    def call_again(self, app, run):
        self.calls.append((app, run))

    def say(self, line):
        self.said.append(line)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def newer_client(rank, addresses):
    """A provider's client with the current API."""
    cluster = SimpleNamespace(
        container_rank=lambda: rank,
        container_ips=lambda family="ipv6": addresses if family == "ipv4" else ["fdaa::1"],
    )
    return SimpleNamespace(Cluster=SimpleNamespace(from_context=lambda: cluster))


def older_client(rank, addresses):
    """A provider's client with the older API."""
    info = SimpleNamespace(
        rank=rank, cluster_id="cu-1", container_ips=["fdaa::1"], container_ipv4_ips=addresses
    )
    return SimpleNamespace(experimental=SimpleNamespace(get_cluster_info=lambda: info))
