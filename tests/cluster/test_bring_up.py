"""Containers become one Ray cluster, by the commands that are run and the connections that are made."""

import os
import socket
import threading

import psutil
import pytest
from lilo_engine.cluster.bring_up import BringUp, Limits, environment_of
from lilo_engine.cluster.membership import ALONE, Cluster, read_cluster
from lilo_engine.cluster.network import check_private
from lilo_engine.cluster.ray_process import HeldRay
from lilo_engine.errors import InvalidRequest, ServerError

from tests.deploy.local_provider import newer_client, older_client

QUICK = Limits(start_s=5, head_s=5, joins=3, between_joins_s=0.01, look_s=0.01, connect_s=1)


class Ray:
    """Notes what is started; each start ends with the next code, or stays when there is none left."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.ran: list[list[str]] = []
        self.stopped = 0

    def __call__(self, command, environment):
        self.ran.append(list(command))
        return Running(self, self.codes.pop(0) if self.codes else None)


class Running:
    def __init__(self, ray: Ray, code: int | None) -> None:
        self.ray, self.code = ray, code

    def has_started(self):
        return self.code is None

    def exit_code(self):
        return self.code

    def stop(self):
        self.ray.stopped += 1


@pytest.fixture
def head():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_one_container_asks_nobody():
    assert read_cluster(object(), 1) == ALONE


@pytest.mark.parametrize("client", [newer_client, older_client])
def test_both_ways_of_asking_give_rank_and_ipv4_addresses(client):
    found = read_cluster(client(1, ["10.0.0.1", "10.0.0.2"]), 2)
    assert (found.rank, found.head, found.own) == (1, "10.0.0.1", "10.0.0.2")
    assert not found.is_head


def test_another_size_than_the_definitions_is_refused_with_both_numbers():
    with pytest.raises(ServerError, match=r"has 3 .* asks for 2"):
        read_cluster(newer_client(0, ["a", "b", "c"]), 2)


def test_traffic_between_machines_goes_past_proxies_and_over_the_interface_that_is_there():
    given = environment_of(Cluster(rank=1, addresses=("10.0.0.1", "127.0.0.1")))
    assert {"10.0.0.1", "127.0.0.1", "localhost"} == set(given["no_proxy"].split(","))
    assert given["NO_PROXY"] == given["no_proxy"]
    assert given["MASTER_ADDR"] == "10.0.0.1"
    assert given["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert given["NCCL_SOCKET_IFNAME"] == given["GLOO_SOCKET_IFNAME"]


def test_without_an_interface_of_that_address_none_is_named():
    given = environment_of(Cluster(rank=1, addresses=("10.0.0.1", "192.0.2.7")))
    assert "GLOO_SOCKET_IFNAME" not in given


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_the_head_prepares_starts_ray_and_waits_for_its_port():
    steps = []
    port = free_port()
    listeners = []

    def start(command, environment):
        steps.append(list(command))
        listeners.append(socket.create_server(("127.0.0.1", port)))
        return Running(Ray(), None)

    cluster = Cluster(rank=0, addresses=("127.0.0.1", "127.0.0.2"))
    BringUp(
        cluster=cluster,
        start=start,
        limits=QUICK,
        port=port,
        prepare=lambda: steps.append("prepared"),
    ).start_head()
    listeners[0].close()
    assert steps[0] == "prepared"
    assert steps[1][:3] == ["ray", "start", "--head"]
    assert f"--port={port}" in steps[1]


def test_a_head_that_does_not_start_says_the_command_and_its_code():
    cluster = Cluster(rank=0, addresses=("127.0.0.1", "127.0.0.2"))
    with pytest.raises(ServerError, match="code 7"):
        BringUp(cluster=cluster, start=Ray(7), limits=QUICK, port=free_port()).start_head()


def test_a_head_whose_port_is_taken_is_refused_before_anything_starts(head):
    ray = Ray()
    cluster = Cluster(rank=0, addresses=("127.0.0.1",))
    with pytest.raises(ServerError, match="listens"):
        BringUp(cluster=cluster, start=ray, limits=QUICK, port=head.getsockname()[1]).start_head()
    assert not ray.ran


def test_a_worker_tries_again_lends_itself_and_ends_with_the_head(head):
    ray = Ray(1, 1)
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    worker = BringUp(cluster=cluster, start=ray, limits=QUICK, port=head.getsockname()[1])
    joined = threading.Event()
    thread = threading.Thread(target=worker.lend, args=(joined.set,))
    thread.start()
    assert joined.wait(10)
    assert [command[:2] for command in ray.ran] == [["ray", "start"]] * 3
    head.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert ray.stopped == 3


def test_a_worker_that_is_asked_to_stop_leaves_a_head_that_runs(head):
    ray = Ray()
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    BringUp(cluster=cluster, start=ray, limits=QUICK, port=head.getsockname()[1]).lend(
        stopped=lambda: True
    )
    assert ray.stopped == 1


def test_a_worker_whose_ray_dies_soon_after_it_joined_says_so_and_does_not_join_again(head):
    ray = Ray()
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    joined = []

    class Dying(Running):
        def has_started(self):
            return True

        def exit_code(self):
            return 137 if joined else None

    def start(command, environment):
        ray.ran.append(list(command))
        return Dying(ray, None)

    worker = BringUp(cluster=cluster, start=start, limits=QUICK, port=head.getsockname()[1])
    with pytest.raises(ServerError, match=r"code 137.* join again"):
        worker.lend(joined=lambda: joined.append(True))
    assert len(ray.ran) == 1


def test_a_worker_that_no_head_takes_names_its_tries(head):
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    worker = BringUp(
        cluster=cluster, start=Ray(1, 1, 1, 1), limits=QUICK, port=head.getsockname()[1]
    )
    with pytest.raises(ServerError, match="3 tries"):
        worker.lend()


def test_a_worker_whose_head_never_comes_names_it_and_the_limit():
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    short = Limits(head_s=0.05, look_s=0.01)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1.* 0\.05 s"):
        BringUp(cluster=cluster, start=Ray(), limits=short, port=free_port()).lend()


@pytest.mark.parametrize("address", ["8.8.8.8", "no address", "192.0.2.7"])
def test_an_address_that_strangers_reach_or_that_is_not_here_is_refused(address):
    with pytest.raises(InvalidRequest):
        check_private(address)


def test_what_holds_ray_ends_it_when_we_are_gone(tmp_path):
    """The holder's standard input is all that keeps it: closed, as by our death, `ray start` ends too."""
    said = tmp_path / "said"
    os.mkfifo(said)
    held = HeldRay(
        ["sh", "-c", f'echo "$$ $LILO_TRIED" > {said}; exec sleep 600'],
        {"LILO_TRIED": "yes"},
    )
    pid, tried = said.read_text().split()  # waits for the writer
    assert tried == "yes"
    assert held.exit_code() is None
    held.stop()
    assert held.exit_code() is not None
    assert not psutil.pid_exists(int(pid))
