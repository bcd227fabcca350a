"""`lilo cluster head|join`: this machine starts a Ray cluster, or lends its devices to one, until it is told to stop.

    on the first machine    lilo cluster head                      prints its address
    on every other one      lilo cluster join --head HOST:PORT
    on the first machine    lilo serve DEFINITION --ray HOST:PORT

What happens is `lilo_engine/cluster/bring_up.py`, which containers of a provider run as well.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer
from lilo_engine.cluster.bring_up import RAY_PORT, BringUp, Devices, Limits
from lilo_engine.cluster.membership import Cluster, cluster_of_container
from lilo_engine.cluster.network import check_private, own_address
from lilo_engine.errors import InvalidRequest, LiloError

LOOK_S = 0.5
"""Between looks at Ray while nothing else is to do."""

app = typer.Typer(
    help="Several machines as one trainer: start a Ray cluster, or join one.", no_args_is_help=True
)

Address = Annotated[
    str | None,
    typer.Option(
        help="Of this machine, in a private network; found if left out.", show_default=False
    ),
]
Port = Annotated[int, typer.Option(help="Where the head listens.", min=1, max=65535)]
Cpus = Annotated[int | None, typer.Option(help="Cores to lend; all if left out.", min=0)]
Gpus = Annotated[int | None, typer.Option(help="GPUs to lend; all if left out.", min=0)]
Containers = Annotated[
    int | None,
    typer.Option(
        help="Inside a container of a Modal cluster of this size: it says which one this is.",
        min=2,
        show_default=False,
    ),
]


@app.command()
def head(
    address: Address = None,
    port: Port = RAY_PORT,
    cpus: Cpus = None,
    gpus: Gpus = None,
    containers: Containers = None,
) -> None:
    """Start a cluster on this machine; Ctrl-C ends it everywhere."""
    with _one_line(), _stop_asked() as asked:
        if containers is not None:
            cluster = _of_provider(containers, wanted_head=True)
        else:
            cluster = Cluster(rank=0, addresses=(_own(address),))
        bring_up = BringUp(cluster=cluster, devices=Devices(cpus=cpus, gpus=gpus), port=port)
        ray = bring_up.start_head()
        try:
            print(f"lilo: the head of a cluster is at {cluster.head}:{port}", flush=True)
            print(f"lilo: on other machines:  lilo cluster join --head {cluster.head}:{port}")
            print(
                f"lilo: on this one:        lilo serve DEFINITION --ray {cluster.head}:{port}",
                flush=True,
            )
            while not asked.wait(LOOK_S):
                if (code := ray.exit_code()) is not None:
                    raise InvalidRequest(f"Ray ended on the head with code {code}; see above why")
        finally:
            ray.stop()


@app.command()
def join(
    head: Annotated[
        str | None,
        typer.Option(help="HOST:PORT, as `lilo cluster head` prints it.", show_default=False),
    ] = None,
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    containers: Containers = None,
    wait: Annotated[float, typer.Option(help="Seconds for the head to come.", min=0)] = 600.0,
) -> None:
    """Lend this machine to a cluster until its head is gone, or Ctrl-C."""
    with _one_line(), _stop_asked() as asked:
        port = RAY_PORT
        if containers is not None:
            cluster = _of_provider(containers, wanted_head=False)
        elif head is not None:
            host, port = _host_and_port(head)
            cluster = Cluster(rank=1, addresses=(host, _own(address, towards=host)))
        else:
            raise InvalidRequest(
                "which cluster? give --head HOST:PORT, as `lilo cluster head` prints it"
            )
        where = f"{cluster.head}:{port}"
        started = time.monotonic()
        BringUp(
            cluster=cluster,
            devices=Devices(cpus=cpus, gpus=gpus),
            port=port,
            limits=Limits(head_s=wait),
        ).lend(
            joined=lambda: print(f"lilo: {cluster.own} lends its devices to {where}", flush=True),
            stopped=asked.is_set,
        )
        why = "it was asked to" if asked.is_set() else "the head is gone"
        print(f"lilo: left {where} after {time.monotonic() - started:.0f} s: {why}", flush=True)


def _own(address: str | None, towards: str | None = None) -> str:
    if address is None:
        # On one machine its own way to the head is loopback, whatever the default route is.
        return "127.0.0.1" if towards == "127.0.0.1" else own_address()
    check_private(address)
    return address


def _host_and_port(head: str) -> tuple[str, int]:
    host, separator, port = head.rpartition(":")
    if not separator or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"--head is {head!r}; expected HOST:PORT, as `lilo cluster head` prints it"
        )
    return host.strip("[]"), int(port)


def _of_provider(containers: int, *, wanted_head: bool) -> Cluster:
    cluster = cluster_of_container(containers)
    if cluster.is_head != wanted_head:
        command = "head" if cluster.is_head else "join"
        raise InvalidRequest(
            f"this is container {cluster.rank} of {containers}; run `lilo cluster {command}` in it"
        )
    return cluster


@contextmanager
def _stop_asked() -> Generator[threading.Event]:
    """Set by Ctrl-C or SIGTERM; what stops is the loop that looks at it."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    yield asked


@contextmanager
def _one_line() -> Generator[None]:
    try:
        yield
    except ImportError as error:
        typer.echo(f"lilo: {error}: pip install 'lilo-engine[modal]'", err=True)
        raise typer.Exit(1) from error
    except LiloError as error:
        typer.echo(f"lilo: {error.message}", err=True)
        raise typer.Exit(1) from error
