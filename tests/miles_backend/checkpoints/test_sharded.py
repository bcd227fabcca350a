"""Training checkpoints of several ranks: each writes its own, any layout reads, and nothing that is short passes."""

import dataclasses
import json
import os

import pytest
import torch
from lilo_engine.errors import CommandFailed, InvalidRequest, NotFound
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.adapter_state import PARTS, assemble
from lilo_miles_backend.checkpoints import load_training, persist_training
from lilo_miles_backend.checkpoints.outcome import PeerFailed, done_alike
from lilo_miles_backend.ranks.share import share_of
from lilo_miles_backend.shards import shard
from lilo_volume import open_named
from lilo_volume.testing import run_ranks

from tests.miles_backend.checkpoints.conftest import (
    assert_equal_states,
    cut_dim,
    destination,
    make_state,
    part_of,
    placed,
)

REF = CheckpointRef(run_id="0ab:train:0", kind="weights", name="one")
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1), (4, 1, 1)]
"""tp, cp, dp; tp fastest, as ranks are ordered. By three, the 260 rows of lm_head.lora_B are cut unevenly."""


@pytest.fixture(scope="module")
def state():
    return make_state(layers=1)


def save(volume, state, tp, cp=1, dp=1, **changed):
    """Save as a trainer of this layout; `changed` replaces what single ranks hold."""

    def persist(group):
        part = changed.get(f"rank{group.rank}", part_of(state, group.rank % tp, tp))
        layout = {"tp": tp, "cp": cp, "dp": dp}
        return persist_training(volume, group, part, destination(), layout=layout)

    return run_ranks(tp * cp * dp, persist)


def load(volume, tp, cp=1, dp=1, **options):
    def read(group):
        return load_training(volume, REF, group=group, place=placed(group.rank % tp, tp), **options)

    return run_ranks(tp * cp * dp, read)


@pytest.mark.parametrize("written", LAYOUTS, ids=str)
def test_any_layout_reads_what_any_other_wrote_bit_for_bit(volume, state, written):
    outcomes = save(volume, state, *written)
    assert len(set(outcomes)) == 1, outcomes
    assert_equal_states(state, load_training(volume, REF))
    for tp, cp, dp in [(2, 1, 1), (4, 1, 1), (2, 1, 2), (3, 1, 1)]:
        for rank, part in enumerate(load(volume, tp, cp, dp)):
            assert_equal_states(part_of(state, rank % tp, tp), part)
            assert part.shards == part_of(state, rank % tp, tp).shards


def test_every_rank_has_a_receipt_and_replicas_are_written_once(volume, state):
    save(volume, state, 2, 1, 2)
    manifest = open_named(volume, REF.run_id, REF.kind, REF.name, verify="full").manifest
    assert (manifest.world_size, manifest.layout) == (4, {"tp": 2, "cp": 1, "dp": 2})
    assert [receipt.rank for receipt in manifest.receipts] == [0, 1, 2, 3]
    for rank, receipt in enumerate(manifest.receipts):
        assert f"__{rank}_0.distcp" in receipt.files
    shards = sum(e.size_bytes for e in manifest.files if e.path.endswith(".distcp"))
    elements = 3 * sum(tensor.numel() for tensor in state.weights.values())
    # torch's own container costs about a kilobyte per tensor; a second copy of replicas would cost 4 bytes each.
    assert shards < 4 * elements + 2_000 * 2 * 3 * len(state.weights)
    document = json.loads(
        (open_named(volume, REF.run_id, REF.kind, REF.name).folder / "checkpoint.json").read_bytes()
    )
    assert document["topology"] == {"tp": 2, "cp": 1, "dp": 2}


@pytest.mark.parametrize(("tp", "replicas"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_each_rank_freezes_a_share_and_together_they_freeze_each_part_once(state, tp, replicas):
    world = tp * replicas
    seen: dict[tuple[str, int], int] = {}
    sizes = []
    for rank in range(world):
        shards = {
            name: shard((tensor.shape[0], tensor.shape[1]), cut_dim(name), rank % tp, tp)
            for name, tensor in state.weights.items()
        }
        names = share_of(shards, everybody=(rank, world), peers=(rank // tp, replicas))
        sizes.append(sum(shards[n].shape[0] * shards[n].shape[1] for n in names))
        for name in names:
            place = (name, shards[name].ranges)
            seen[place] = seen.get(place, 0) + 1
    assert set(seen.values()) == {1}
    assert sum(sizes) == sum(tensor.numel() for tensor in state.weights.values())


def test_what_all_ranks_left_out_is_missed_and_named(volume, state):
    name = "lm_head.lora_A"

    def persist(group):
        part = part_of(state, group.rank, 2)
        everything = {
            n: shard((t.shape[0], t.shape[1]), cut_dim(n), group.rank, 2)
            for n, t in state.weights.items()
        }
        less = {k: {n: t for n, t in getattr(part, k).items() if n != name} for k in PARTS}
        return persist_training(
            volume, group, dataclasses.replace(part, shards=everything, **less), destination()
        )

    outcomes = run_ranks(2, persist)
    assert [type(outcome) for outcome in outcomes] == [CommandFailed] * 2
    assert all(name in str(outcome) and "nothing" in str(outcome) for outcome in outcomes)


def test_without_the_optimizer_a_rank_gets_fresh_moments_of_its_part(volume, state):
    save(volume, state, 2)
    for rank, part in enumerate(load(volume, 4, with_optimizer=False)):
        wanted = part_of(state, rank, 4)
        assert part.optimizer_step == 0
        for name, tensor in wanted.weights.items():
            assert torch.equal(part.weights[name], tensor)
            assert part.exp_avg[name].shape == tensor.shape
            assert not part.exp_avg[name].any()


def test_a_part_that_no_rank_holds_is_refused_at_save_by_name_and_the_previous_stays(volume, state):
    save(volume, state, 2)
    whole = part_of(state, 1, 2)
    name = "lm_head.lora_B"
    short = dataclasses.replace(
        whole,
        weights={k: t for k, t in whole.weights.items() if k != name},
        exp_avg={k: t for k, t in whole.exp_avg.items() if k != name},
        exp_avg_sq={k: t for k, t in whole.exp_avg_sq.items() if k != name},
    )

    def persist(group):
        part = short if group.rank else part_of(state, 0, 2)
        later = dataclasses.replace(part, optimizer_step=12)
        return persist_training(volume, group, later, destination(overwrite=True))

    outcomes = run_ranks(2, persist)
    assert [type(outcome) for outcome in outcomes] == [CommandFailed] * 2
    assert all(f"weights.{name}" in str(outcome) for outcome in outcomes), outcomes
    assert "short of 3 of" in str(outcomes[0])
    assert load_training(volume, REF).optimizer_step == 11


def test_a_shard_that_went_missing_is_refused_at_load_by_name_on_every_rank(volume, state):
    folder = save(volume, state, 4)[0].folder
    os.unlink(os.path.join(folder, "__2_0.distcp"))
    outcomes = load(volume, 2)
    assert [type(outcome) for outcome in outcomes] == [CommandFailed] * 2
    assert all("__2_0.distcp is missing" in str(outcome) for outcome in outcomes)


def test_a_state_that_one_rank_has_not_whole_fails_all_ranks_alike(volume, state):
    part = part_of(state, 1, 2)
    broken = dataclasses.replace(part, exp_avg={})
    outcomes = save(volume, state, 2, rank1=broken)
    assert [type(outcome) for outcome in outcomes] == [CommandFailed] * 2
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert volume.list_committed("") == []


def test_what_does_not_fit_the_model_is_the_users_error_on_every_rank(volume, state):
    save(volume, state, 2)

    def refuse(base_model, spec, shapes):
        raise InvalidRequest(f"{base_model} is not what this trainer has")

    outcomes = run_ranks(2, lambda group: load_training(volume, REF, group=group, place=refuse))
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest] * 2
    unknown = dataclasses.replace(REF, name="two")
    outcomes = run_ranks(2, lambda group: load_training(volume, unknown, group=group))
    assert [type(outcome) for outcome in outcomes] == [NotFound] * 2


def test_one_ranks_user_error_is_everybodys_and_a_fault_breaks_the_group():
    def outcomes(error):
        def act(group):
            def work():
                if group.rank == 1:
                    raise error
                return group.rank

            return done_alike(group, work, step="work", timeout_s=10.0)

        return run_ranks(3, act)

    assert [type(o) for o in outcomes(InvalidRequest("no"))] == [InvalidRequest] * 3
    assert [type(o) for o in outcomes(ZeroDivisionError("a fault"))] == [
        PeerFailed,
        ZeroDivisionError,
        PeerFailed,
    ]


def test_a_rank_that_does_not_come_breaks_the_group_and_publishes_nothing(volume, state):
    def persist(group):
        if group.rank == 1:
            group.close()
            return None
        return persist_training(volume, group, part_of(state, 0, 2), destination())

    outcome = run_ranks(2, persist)[0]
    assert isinstance(outcome, PeerFailed)
    assert "rank 1" in str(outcome)


def test_the_parts_of_all_ranks_make_up_the_whole_and_a_missing_one_is_named(state):
    parts = [part_of(state, rank, 4) for rank in range(4)]
    assert_equal_states(state, assemble([*parts, parts[1]]))
    assert_equal_states(state, assemble([part_of(state, 0, 1)]))
    with pytest.raises(CommandFailed, match=r"q_proj\.lora_B"):
        assemble([parts[0], parts[1], parts[3]])
