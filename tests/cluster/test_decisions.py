"""What a driver decides, without a process: first causes, agreement of ranks, enough machines, limits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from lilo_definitions import Topology, get
from lilo_engine.commands.bridge import command_limit
from lilo_engine.errors import BackendLost, CommandFailed, InvalidRequest, Unavailable
from lilo_miles_backend.cluster.nodes import Needed, Node, nodes_of, require_cluster_nodes
from lilo_miles_backend.launchers.agreement import check_agreement
from lilo_miles_backend.launchers.answers import Disagreement, settle
from lilo_miles_backend.launchers.first_cause import Evidence, Weight, first_cause
from lilo_miles_backend.launchers.limits import DriverLimits
from lilo_miles_backend.launchers.mailboxes import Done
from lilo_miles_backend.rank_commands import RankInfo

INFO = RankInfo(
    rank=0, pid=10, device="cpu", losses=("cross_entropy",), node="a", facts={"torch": "2.13"}
)


def test_b40_the_first_cause_is_what_can_have_caused_the_others_whatever_order_they_come_in() -> (
    None
):
    peer = Evidence(weight=Weight.PEER, at_s=1.0, words="connection closed by peer")
    limit = Evidence(weight=Weight.LIMIT, at_s=2.0, words="waited for 3 s")
    later = Evidence(weight=Weight.RAISED, at_s=4.0, words="raised later")
    raised = Evidence(weight=Weight.RAISED, at_s=3.0, words="raised")
    for order in itertools.permutations([peer, limit, later, raised]):
        assert first_cause(order) == "raised"
    ended = Evidence(weight=Weight.ENDED, at_s=9.0, words="was killed")
    assert first_cause([raised, ended]) == "was killed"


def test_ranks_that_differ_are_refused_with_a_table_of_what_differs() -> None:
    other = replace(
        INFO, rank=1, node="b", pid=11, facts={"torch": "2.12", "LILO_CHECKPOINT_VOLUME": "v"}
    )
    with pytest.raises(BackendLost) as caught:
        check_agreement([INFO, other], INFO.facts)
    told = str(caught.value)
    assert "LILO_CHECKPOINT_VOLUME, torch" in told or "torch, LILO_CHECKPOINT_VOLUME" in told
    rows = [line.split() for line in told.splitlines()[1:]]
    assert rows[0][:3] == ["rank", "node", "pid"]
    assert {row[1] for row in rows[1:]} == {"-", "a", "b"}
    assert {"2.13", "2.12"} <= {cell for row in rows for cell in row}
    check_agreement([INFO, replace(INFO, rank=1, pid=12, node="b")], INFO.facts)


def test_b37_a_variable_that_only_the_driver_has_is_a_difference() -> None:
    driver = {**INFO.facts, "LILO_CHECKPOINT_VOLUME": "runs"}
    with pytest.raises(BackendLost, match="LILO_CHECKPOINT_VOLUME"):
        check_agreement([INFO, replace(INFO, rank=1)], driver)


def test_b39_a_limit_that_a_group_did_not_take_over_is_a_difference() -> None:
    here = replace(INFO, group_limits_s={"tp": 7200.0})
    with pytest.raises(BackendLost, match="limit of group tp"):
        check_agreement([here, replace(here, rank=1, group_limits_s={"tp": 1800.0})], INFO.facts)


def test_ranks_whose_cards_attend_with_other_kernels_are_refused_by_both_names() -> None:
    here = replace(INFO, attention="cuDNN, FA2 packed")
    with pytest.raises(BackendLost, match="attention") as caught:
        check_agreement([here, replace(here, rank=1, attention="FA2, FA2 packed")], INFO.facts)
    assert all(name in str(caught.value) for name in ("cuDNN, FA2 packed", "FA2, FA2 packed"))


def test_all_ranks_refuse_or_none() -> None:
    refused = InvalidRequest("no gradients")
    with pytest.raises(InvalidRequest):
        settle("train", {0: refused, 1: InvalidRequest("no gradients")})
    with pytest.raises(Disagreement, match="rank 0: done; rank 1: no gradients"):
        settle("train", {0: Done(value=None), 1: refused})
    with pytest.raises(CommandFailed):
        settle("persist", {0: Done(value=None), 1: CommandFailed("not published")})
    assert settle("train", {1: Done(value="b"), 0: Done(value="a")}) == ["a", "b"]


def node(name: str, **devices: float) -> Node:
    return Node(node_id=name, address=f"10.0.0.{name}", devices=devices)


NEEDED = Needed.of(
    Topology.model_validate({"device": "cuda", "nodes": 2, "gpus_per_node": 8, "tp": 2, "cp": 8})
)


def test_b38_sixteen_gpus_of_one_machine_are_not_two_of_eight() -> None:
    with pytest.raises(Unavailable) as caught:
        require_cluster_nodes(NEEDED, lambda: [node("1", CPU=64, GPU=16)], limit_s=0.0)
    assert "2 nodes with 8 CPU and 8 GPU each" in str(caught.value)
    assert "1 node (10.0.0.1: 64 CPU, 16 GPU)" in str(caught.value)


def test_b38_a_machine_without_gpus_or_listed_twice_does_not_count_and_a_late_one_does() -> None:
    one, bare, late = node("1", CPU=8, GPU=8), node("2", CPU=8), node("3", CPU=8, GPU=8)
    looks = iter([[one, one], [one, bare], [one, bare, late]])
    assert require_cluster_nodes(NEEDED, lambda: next(looks), limit_s=5.0) == (one, late)


def test_a_machine_that_is_dead_is_none() -> None:
    entry = {"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 2.0}}
    alive = nodes_of([{**entry, "Alive": True}, {**entry, "NodeID": "m", "Alive": False}])
    assert [found.node_id for found in alive] == ["n"]


def test_the_driver_tells_before_the_engine_gives_it_up() -> None:
    for seconds in (1.0, 60.0, 7200.0):
        limits = get("tiny").limits.model_copy(update={"command_timeout_s": seconds})
        ours, words = DriverLimits(limits=limits, silence_s=30.0).command(object())
        theirs, _ = command_limit("optim_step", (), limits)
        assert theirs - 3.5 < ours < theirs
        assert "limits.command_timeout_s" in words


def test_nothing_but_the_folder_for_it_imports_ray() -> None:
    package = Path(__file__).parents[2] / "packages/lilo-miles-backend/src/lilo_miles_backend"
    importing = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if any(
            line.lstrip().startswith(("import ray", "from ray"))
            for line in path.read_text("utf-8").splitlines()
        )
    }
    assert importing == {"cluster"}
