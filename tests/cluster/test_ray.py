"""Ranks on two raylets with environments of their own, through `lilo cluster`: one cluster for all tests here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lilo_engine.commands.backend import BackendConfig
from lilo_engine.errors import BackendLost, InvalidRequest, Unavailable
from lilo_miles_backend.cluster import ray_ranks
from lilo_miles_backend.cluster.ray_ranks import start_ray_ranks
from lilo_miles_backend.config import BackendSettings
from lilo_miles_backend.launchers.driver import DrivenRanks

from tests.cluster.conftest import LIGHT, act, world_of_two
from tests.cluster.hosts import Cluster, cluster, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with two_hosts(apart=False) as hosts, cluster(hosts) as found:
        found.start_head(1)
        found.start_join(hosts[1], 1)
        yield found


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's driver prints warnings of its own and leaves sockets to the collector."""
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")


def start(ray: Cluster, root: Path, *, nodes: int = 2, **settings: float) -> DrivenRanks:
    definition = world_of_two()
    topology = definition.topology.model_copy(update={"nodes": nodes, "dp": nodes})
    config = BackendConfig(
        definition=definition.model_copy(update={"topology": topology}),
        checkpoints_root=str(root),
        epoch=1,
    )
    return start_ray_ranks(config, BackendSettings(rank_class=LIGHT, **settings), ray.address)


def test_b37_ranks_stand_on_both_nodes_have_what_the_driver_has_and_end_for_one_of_them(
    ray: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LILO_CHECKPOINT_VOLUME", "shared://")
    ranks = start(ray, tmp_path)
    assert {info.node for info in ranks.info()} == {"host-0", "host-1"}
    assert {info.facts["LILO_CHECKPOINT_VOLUME"] for info in ranks.info()} == {"shared://"}
    assert ranks.train(act("sum")) == {"sum": 2.0}
    with pytest.raises(InvalidRequest):
        ranks.train(act("refuse"))
    assert [view.rank for view in ranks.progress()] == [0, 1]

    pids = [info.pid for info in ranks.info()]
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    assert "rank 1" in ranks.wait_lost()
    assert time.monotonic() - started < 15
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(BackendLost):
        ranks.train(act("sum"))


def test_what_is_asked_of_ray_without_a_connection_starts_no_cluster() -> None:
    # Here, and not above: Ray reads what forbids that when it is imported, as the backend does.
    import ray as ray_itself

    with pytest.raises(Exception, match="init"):
        ray_itself.get_actor("nobody")
    assert not ray_itself.is_initialized()


def test_b37_ranks_without_what_the_driver_has_are_refused_with_its_name(
    ray: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LILO_CHECKPOINT_VOLUME", "shared://")
    monkeypatch.setattr(ray_ranks, "handed_over", dict)
    with pytest.raises(BackendLost, match="LILO_CHECKPOINT_VOLUME"):
        start(ray, tmp_path)


def test_b38_a_node_too_few_is_an_error_with_both_counts_and_leaves_the_cluster_free(
    ray: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match=r"needs 3 nodes .* has 2 nodes"):
        start(ray, tmp_path, nodes=3, cluster_wait_s=0.5)
    ranks = start(ray, tmp_path)
    assert ranks.train(act("sum")) == {"sum": 2.0}
    ranks.close()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path, address: str) -> None:
    config = BackendConfig(definition=world_of_two(), checkpoints_root=str(tmp_path), epoch=1)
    with pytest.raises((InvalidRequest, Unavailable), match=address):
        start_ray_ranks(config, BackendSettings(), address)
