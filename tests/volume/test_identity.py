"""Who the ranks are: duplicates, and ranks without a volume or with another one, are refused at the start."""

from dataclasses import replace

import pytest
from lilo_volume import IdentityRefused, LocalVolume, RankFailed, RankLost
from lilo_volume.config import node_id
from lilo_volume.faults import Fault, Faults
from lilo_volume.node import Identity, identity_fault, table

from tests.volume.cluster import NODES, WORLD, Cluster


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def identity(rank, **changes):
    base = Identity(
        rank=rank, world_size=2, node=f"n{rank}", host="modal", boot="b", process=1, volume="v"
    )
    return replace(base, **changes)


def test_good_identities_have_no_fault():
    assert identity_fault([identity(0), identity(1)]) is None
    assert identity_fault([identity(0), identity(1, node="n0")]) is None


@pytest.mark.parametrize(
    "second",
    [
        identity(0),
        identity(2),
        identity(1, world_size=3),
        identity(1, volume=None),
        identity(1, node="n0", boot="another"),
        identity(1, node="n0", host="another"),
    ],
    ids=[
        "rank twice",
        "rank missing",
        "another world",
        "no volume",
        "another boot",
        "another host",
    ],
)
def test_identities_that_cannot_be_right_have_a_fault(second):
    assert identity_fault([identity(0), second]) is not None


def test_the_table_has_a_line_per_rank():
    lines = table([identity(0), identity(1, volume=None)]).splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("-")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"MODAL_TASK_ID": "ta-1", "NCCL_HOSTID": "h"}, "ta-1"),
        ({"NCCL_HOSTID": "h"}, "h"),
    ],
)
def test_a_node_is_known_by_its_task_then_by_what_nccl_calls_it(environment, wanted, monkeypatch):
    for name in ("MODAL_TASK_ID", "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    node_id.cache_clear()
    by_boot = node_id()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    node_id.cache_clear()
    try:
        assert node_id() == wanted != by_boot
    finally:
        node_id.cache_clear()


def refused(cluster, **by_rank):
    outcomes = cluster.run(
        lambda group: cluster.save(group, **by_rank.get(f"rank_{group.rank}", {}))
    )
    assert all(isinstance(outcome, IdentityRefused) for outcome in outcomes), outcomes
    assert all(len(outcome.table.splitlines()) == WORLD + 1 for outcome in outcomes)
    # Nothing is left but, at most, what carries a note.
    assert all(path.endswith("/attempt.json") for path in cluster.committed())
    return outcomes


def test_two_nodes_that_claim_one_identity_are_refused_on_all_ranks(cluster):
    refused(cluster, rank_2={"node": "n0"}, rank_3={"node": "n0"})


def test_a_rank_without_a_volume_is_refused_on_all_ranks(cluster):
    outcomes = refused(cluster, rank_3={"volume": None})
    assert outcomes[0].table.splitlines()[4].endswith("-")


def test_a_node_with_another_volume_is_refused_on_all_ranks(cluster, tmp_path):
    other = Cluster(tmp_path / "other")
    refused(cluster, rank_2={"volume": other.volume(2)}, rank_3={"volume": other.volume(3)})


def test_a_node_whose_directory_of_the_same_name_is_another_one_is_refused(cluster, tmp_path):
    here, there = LocalVolume(tmp_path / "here"), LocalVolume(tmp_path / "there")
    outcomes = cluster.run(
        lambda group: cluster.save(group, volume=here if group.rank < 2 else there)
    )
    assert all(isinstance(outcome, IdentityRefused) for outcome in outcomes)


def test_one_node_that_goes_by_two_names_does_no_harm(tmp_path):
    cluster = Cluster(tmp_path)
    found = cluster.run(lambda group: cluster.save(group, node=f"{NODES[group.rank]}-{group.rank}"))
    assert cluster.newest() == "20"
    assert len({receipt.node for receipt in found[0].manifest.receipts}) == WORLD


@pytest.mark.parametrize("step", ["begin", "join", "probe", "flush", "report"])
def test_a_rank_that_fails_is_named_with_its_node_on_all_ranks(cluster, step):
    faults = Faults(Fault(step=step, action="raise", error=OSError))
    outcomes = cluster.run(
        lambda group: cluster.save(group, on_step=faults if group.rank == 2 else None)
    )
    assert all(isinstance(outcome, RankFailed) for outcome in outcomes), outcomes
    assert {(outcome.rank, outcome.node) for outcome in outcomes} == {(2, "n1")}


def test_a_rank_that_dies_is_named_with_its_node_and_the_step(cluster):
    faults = Faults(Fault(step="create *", action="stop"))
    outcomes = cluster.run(
        lambda group: cluster.save(group, on_step=faults if group.rank == 3 else None)
    )
    for rank in range(3):
        assert isinstance(outcomes[rank], RankLost)
        assert (outcomes[rank].ranks, outcomes[rank].nodes) == ((3,), ("n1",))
        assert outcomes[rank].step == "report"
    assert cluster.newest() is None
