"""Bridge: both sides in one process, for what a trainer of ours would never do."""

import socket
import threading

import pytest
from lilo_engine.commands import bridge_server
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.commands.bridge import connections
from lilo_engine.commands.bridge_client import BridgeClient
from lilo_engine.commands.command import CaptureId, Destination
from lilo_engine.commands.memory import MemoryBackend
from lilo_engine.errors import BackendLost


class Unspeakable(MemoryBackend):
    """A trainer whose answers cannot be put into a frame."""

    def persist(self, capture_id, destination):
        return object()

    def describe(self):
        return object()


@pytest.fixture
def client(tiny, tmp_path):
    backend = Unspeakable(BackendConfig(definition=tiny, checkpoints_root=str(tmp_path), epoch=1))
    pairs = {
        channel: [socket.socketpair() for _ in range(count)]
        for channel, count in connections(tiny.limits.publication_workers).items()
    }
    theirs = {channel: [their for _, their in members] for channel, members in pairs.items()}
    ours = {channel: [our for our, _ in members] for channel, members in pairs.items()}
    lost = []
    server = threading.Thread(
        target=bridge_server.serve,
        args=(backend, theirs),
        kwargs={"epoch": 1, "on_lost": lost.append},
    )
    server.start()
    client = BridgeClient(ours, epoch=1, limits=tiny.limits)
    yield client
    client.close()
    client.release()
    server.join(5)
    assert not server.is_alive()
    assert all("cannot travel" in cause for cause in lost)
    for members in theirs.values():
        for stream in members:
            stream.close()


@pytest.mark.timeout(20)
def test_an_answer_that_cannot_travel_gives_the_trainer_up_instead_of_leaving_its_caller_waiting(
    client,
):
    destination = Destination(run_id="m", kind="weights", name="x", order=1, overwrite=False)
    with pytest.raises(BackendLost, match="persist"):
        client.persist(CaptureId("c"), destination)


@pytest.mark.timeout(20)
def test_the_same_holds_on_the_gpu_lane(client):
    with pytest.raises(BackendLost, match="describe"):
        client.describe()
