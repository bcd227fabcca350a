"""One contract, three kinds of group: threads, sockets, torch."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lilo_volume.groups.tcp import tcp_group
from lilo_volume.testing import run_ranks
from lilo_volume.testing.group_contract import GROUP_CONTRACT

WORLD = 3
RANK = Path(__file__).with_name("torch_rank.py")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def by_name(check) -> str:
    return check.__name__


def raise_first(outcomes) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


@pytest.mark.parametrize("check", GROUP_CONTRACT, ids=by_name)
def test_threads_keep_the_contract(check):
    raise_first(run_ranks(WORLD, check))


@pytest.mark.parametrize("check", GROUP_CONTRACT, ids=by_name)
def test_sockets_keep_the_contract(check):
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    done = threading.Barrier(WORLD)

    def act(place):
        group = tcp_group(
            address,
            rank=place.rank,
            world_size=WORLD,
            token="secret",
            timeout_s=20.0,
            listener=listener if place.rank == 0 else None,
        )
        with group:
            try:
                check(group)
            finally:
                done.wait(timeout=30.0)

    raise_first(run_ranks(WORLD, act))


@pytest.mark.slow
def test_torch_keeps_the_contract():
    pytest.importorskip("torch")
    port = free_port()
    command = [sys.executable, str(RANK), str(port), str(WORLD)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=50)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(outputs)
    assert all(output.count("kept:") == len(GROUP_CONTRACT) for output in outputs), outputs
