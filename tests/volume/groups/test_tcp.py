"""Sockets: who is let in, who is named when it leaves, and what strangers can do: nothing."""

import contextlib
import socket
import threading
import time

import pytest
from lilo_volume import GroupRefused, MissingFiles, RankLost
from lilo_volume.groups import tcp
from lilo_volume.groups.link import MAX_GREETING_BYTES, Link
from lilo_volume.groups.tcp import tcp_group

SOON_S = 5.0
WELL_BEFORE_S = 30.0
"""Of a minute that a wait may take at most; a busy machine may be late."""


class Meeting:
    """Runs one function per rank, each in a thread, over sockets on a free port."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def join(self, rank, world_size, *, token="secret", timeout_s=10.0):
        return tcp_group(
            self.address,
            rank=rank,
            world_size=world_size,
            token=token,
            node=f"node{rank // 2}",
            timeout_s=timeout_s,
            listener=self.listener if rank == 0 else None,
        )

    def run(self, *actions):
        outcomes = [None] * len(actions)

        def run(index, action):
            try:
                outcomes[index] = action()
            except Exception as error:
                outcomes[index] = error

        threads = [threading.Thread(target=run, args=item) for item in enumerate(actions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


@pytest.fixture
def meeting():
    made = Meeting()
    yield made
    made.listener.close()


def test_every_rank_knows_the_node_of_every_rank(meeting):
    def come(rank):
        with meeting.join(rank, 4) as group:
            group.barrier(timeout_s=SOON_S, step="all here")
            return group.nodes

    outcomes = meeting.run(*[lambda rank=rank: come(rank) for rank in range(4)])
    assert outcomes == [("node0", "node0", "node1", "node1")] * 4


def test_a_rank_that_leaves_is_named_at_once_with_its_node_and_the_step(meeting):
    def come(rank):
        with meeting.join(rank, 4) as group:
            group.barrier(timeout_s=SOON_S, step="all here")
            if rank == 3:
                return None
            group.all_gather(rank, timeout_s=60.0, step="commit")

    start = time.monotonic()
    outcomes = meeting.run(*[lambda rank=rank: come(rank) for rank in range(4)])
    assert time.monotonic() - start < WELL_BEFORE_S
    for outcome in outcomes[:3]:
        assert isinstance(outcome, RankLost)
        assert (outcome.step, outcome.ranks, outcome.nodes) == ("commit", (3,), ("node1",))
        assert "rank 3 on node node1" in str(outcome)


def test_rank_zero_leaving_is_named_at_once_too(meeting):
    def come(rank):
        with meeting.join(rank, 3) as group:
            if rank == 0:
                return None
            group.barrier(timeout_s=60.0, step="commit")

    start = time.monotonic()
    outcomes = meeting.run(*[lambda rank=rank: come(rank) for rank in range(3)])
    assert time.monotonic() - start < WELL_BEFORE_S
    assert [outcome.ranks for outcome in outcomes[1:]] == [(0,), (0,)]


def test_a_rank_whose_value_cannot_cross_fails_itself_and_is_named_on_others(meeting):
    def come(rank):
        with meeting.join(rank, 2) as group:
            group.all_gather(object() if rank == 1 else None, timeout_s=60.0, step="send")

    first, second = meeting.run(lambda: come(0), lambda: come(1))
    assert isinstance(first, RankLost)
    assert first.ranks == (1,)
    assert isinstance(second, TypeError)


def test_ranks_on_different_paths_are_told_so(meeting):
    def come(rank):
        with meeting.join(rank, 2) as group:
            group.barrier(timeout_s=SOON_S, step=f"step of {rank}")

    assert all(isinstance(o, AssertionError) for o in meeting.run(lambda: come(0), lambda: come(1)))


def test_a_wrong_token_is_refused_and_the_right_ones_still_meet(meeting):
    refused = []

    def intrude():
        with pytest.raises(GroupRefused) as caught:
            meeting.join(1, 2, token="guess")
        refused.append(caught.value)
        return meeting.join(1, 2).nodes

    outcomes = meeting.run(lambda: meeting.join(0, 2).nodes, intrude)
    assert outcomes == [("node0", "node0")] * 2
    assert refused


def test_a_listener_that_does_not_know_the_token_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            peer, _ = impostor.accept()
            with peer:
                hello = b'{"hello": "lilo-volume group 1", "challenge": "00"}'
                peer.sendall(b"\x01" + len(hello).to_bytes(4, "big") + hello)
                peer.recv(4096)
                proof = b'{"proof": "00", "who": {"rank": 0, "world_size": 2, "node": "a", "process": "b"}}'
                peer.sendall(b"\x01" + len(proof).to_bytes(4, "big") + proof)
                peer.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(GroupRefused):
            tcp_group(
                f"127.0.0.1:{impostor.getsockname()[1]}",
                rank=1,
                world_size=2,
                token="secret",
                timeout_s=SOON_S,
            )
        thread.join()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"\x01\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x02{}",
        b"\x01\x00\x00\x0f\xa0" + 4000 * b"[",
        b"",
    ],
)
def test_strangers_are_turned_away_and_hold_nobody_up(meeting, noise):
    port = meeting.listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(noise)
        outcomes = meeting.run(lambda: meeting.join(0, 2).nodes, lambda: meeting.join(1, 2).nodes)
    assert outcomes == [("node0", "node0")] * 2


def test_a_stranger_gets_no_more_memory_than_a_greeting_takes():
    stranger, ours = socket.socketpair()
    with stranger:
        link = Link(ours)
        stranger.setblocking(False)
        for _ in range(20):
            with contextlib.suppress(BlockingIOError):
                stranger.send(100_000 * b"\x01")
            link.pull()
        assert len(link._received) < 2 * MAX_GREETING_BYTES
        link.close()


def test_two_that_claim_one_rank_are_refused_on_all_with_the_table(meeting):
    outcomes = meeting.run(*[lambda rank=rank: meeting.join(rank, 4) for rank in (0, 1, 1)])
    assert all(isinstance(outcome, GroupRefused) for outcome in outcomes)
    assert "rank 1 of 4 on node node0" in str(outcomes[0])


def test_different_world_sizes_are_refused_on_all(meeting):
    outcomes = meeting.run(lambda: meeting.join(0, 2), lambda: meeting.join(1, 3))
    assert all(isinstance(outcome, GroupRefused) for outcome in outcomes)


def test_who_does_not_come_to_the_rendezvous_is_named_on_those_that_did(meeting):
    outcomes = meeting.run(*[lambda r=r: meeting.join(r, 3, timeout_s=0.4) for r in (0, 1)])
    assert [type(outcome) for outcome in outcomes] == [RankLost, RankLost]
    assert [outcome.ranks for outcome in outcomes] == [(2,), (2,)]


def test_no_rank_zero_is_an_error_within_the_limit():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        start = time.monotonic()
        with pytest.raises(RankLost):
            tcp_group(
                f"127.0.0.1:{sock.getsockname()[1]}",
                rank=1,
                world_size=2,
                token="t",
                timeout_s=0.3,
            )
        assert time.monotonic() - start < WELL_BEFORE_S


def test_a_second_rank_zero_is_refused(meeting):
    with pytest.raises(GroupRefused):
        tcp_group(meeting.address, rank=0, world_size=2, token="t", timeout_s=1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 2}, {"rank": -1}, {"token": ""}, {"address": "nowhere"}, {"address": "a:b"}],
)
def test_bad_arguments_are_refused_before_anything_is_opened(wrong):
    arguments = {"address": "127.0.0.1:1", "rank": 0, "world_size": 2, "token": "t"} | wrong
    with pytest.raises(GroupRefused):
        tcp_group(arguments.pop("address"), timeout_s=0.1, **arguments)


def test_one_rank_alone_needs_no_peer(meeting):
    with meeting.join(0, 1) as group:
        assert group.all_gather("me", timeout_s=1.0, step="alone") == ["me"]


def test_a_value_over_the_limit_is_refused_by_its_sender(meeting, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_VALUE_BYTES", 1000)
    with meeting.join(0, 1) as group, pytest.raises(TypeError):
        group.all_gather("x" * 2000, timeout_s=1.0, step="much")


def test_a_closed_group_raises_at_once(meeting):
    group = meeting.join(0, 1)
    group.close()
    with pytest.raises(GroupRefused):
        group.barrier(timeout_s=60.0, step="late")


def test_an_error_crosses_with_its_parts(meeting):
    def come(rank):
        with meeting.join(rank, 2) as group:
            return group.broadcast(
                MissingFiles("c", ("x",), 2) if rank == 0 else None, timeout_s=SOON_S, step="tell"
            )

    assert [outcome.missing for outcome in meeting.run(lambda: come(0), lambda: come(1))] == [
        ("x",),
        ("x",),
    ]
