"""Containers become one Ray cluster, by the commands that are run and the connections that are made."""

import socket
import threading

import pytest
from lilo_engine.deploy.bring_up import BringUp, Limits, environment_of, run_command
from lilo_engine.deploy.cluster import ALONE, Cluster, read_cluster
from lilo_engine.errors import ServerError

from tests.deploy.local_provider import newer_client, older_client

QUICK = Limits(command_s=5, head_s=5, joins=3, between_joins_s=0.01, look_s=0.01, connect_s=1)


class Ray:
    """Notes the commands; each answers with the next exit code."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.ran: list[list[str]] = []

    def __call__(self, command, environment, timeout_s):
        self.ran.append(list(command))
        return self.codes.pop(0) if self.codes else 0


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


def test_traffic_between_containers_goes_past_proxies_and_over_the_private_network():
    given = environment_of(Cluster(rank=1, addresses=("10.0.0.1", "10.0.0.2")))
    assert {"10.0.0.1", "10.0.0.2", "127.0.0.1", "localhost"} == set(given["no_proxy"].split(","))
    assert given["NO_PROXY"] == given["no_proxy"]
    assert given["MASTER_ADDR"] == "10.0.0.1"
    assert given["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_head_starts_ray_and_waits_for_its_port(head):
    ray = Ray()
    cluster = Cluster(rank=0, addresses=("127.0.0.1", "127.0.0.2"))
    port = head.getsockname()[1]
    BringUp(cluster=cluster, commands=ray, limits=QUICK, port=port).start_head()
    assert ray.ran[0][:3] == ["ray", "start", "--head"]
    assert f"--port={port}" in ray.ran[0]


def test_a_head_that_does_not_start_says_the_command_and_its_code():
    cluster = Cluster(rank=0, addresses=("127.0.0.1", "127.0.0.2"))
    with pytest.raises(ServerError, match="code 7"):
        BringUp(cluster=cluster, commands=Ray(7), limits=QUICK).start_head()


def test_a_worker_tries_again_lends_itself_and_ends_with_the_head(head):
    ray = Ray(1, 1, 0)
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    worker = BringUp(cluster=cluster, commands=ray, limits=QUICK, port=head.getsockname()[1])
    thread = threading.Thread(target=worker.lend)
    thread.start()
    while len(ray.ran) < 3:
        assert thread.is_alive()
    assert all(command[:2] == ["ray", "start"] for command in ray.ran[:3])
    head.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert ray.ran[-1][:2] == ["ray", "stop"]


def test_a_worker_whose_head_never_comes_names_it_and_the_limit():
    cluster = Cluster(rank=1, addresses=("127.0.0.1", "127.0.0.2"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    short = Limits(head_s=0.05, look_s=0.01)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1.* 0\.05 s"):
        BringUp(cluster=cluster, commands=Ray(), limits=short, port=port).lend()


def test_commands_get_our_variables_and_have_a_limit():
    check = ["sh", "-c", 'test "$LILO_TRIED" = yes']
    assert run_command(check, {"LILO_TRIED": "yes"}, 5) == 0
    assert run_command(check, {}, 5) == 1
    with pytest.raises(ServerError, match=r"0\.05 s"):
        run_command(["sleep", "5"], {}, 0.05)
