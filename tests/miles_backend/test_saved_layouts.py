"""What several ranks save, others load: every layout's checkpoint is every layout's, moments and step count exact.

B31 (only one tensor-parallel shard is saved) and B36 (several writers of one file; new ranks start afresh) are here.
The checkpoints themselves, without models, are in `checkpoints/test_sharded.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lilo_definitions import Definition
from lilo_engine.commands.command import Destination, Published
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.adapter_state import AdapterState, flat_tensors
from lilo_miles_backend.checkpoints import load_training
from lilo_miles_backend.rank_commands import Capture, CreateAdapter, Fetch, Load, Persist
from lilo_miles_backend.ranks.frozen import Frozen
from lilo_volume import LocalVolume, open_named
from safetensors.torch import load_file

from tests.miles_backend import reference as ref
from tests.miles_backend.layouts import World, laid_out, world

TOLERANCE = 1e-5
"""max|d| / max|ref|: one layout sums in another order than the next."""
DATA = ref.ragged((5, 12, 31), np.random.default_rng(30), vocab=97)
SOURCE = CheckpointRef(run_id="m", kind="weights", name="two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def definition(folder: Path) -> Definition:
    """Four key/value heads, so that four tensor-parallel ranks have one each."""
    return ref.write_random_model(
        folder / "model", tied=True, num_attention_heads=8, num_key_value_heads=4
    )


def persist(rank: Any, capture_id: str, kind: str, name: str) -> Published | None:
    """As the mailboxes do: a training state by all ranks, sampler weights by rank 0 alone."""
    destination = Destination(run_id="m", kind=kind, name=name, order=2, overwrite=False)  # type: ignore[arg-type]
    if kind != "weights" and rank.info().rank:
        return None
    return rank.persist(Persist(capture_id=capture_id, destination=destination))  # type: ignore[arg-type]


def fetch(rank: Any) -> None:
    rank.persist(Fetch(fetch_id="f", source=SOURCE, with_optimizer=True))


def execute(rank: Any, command: object) -> object:
    return rank.execute(command)


def waiting(rank: Any) -> int:
    return len(rank._storage._captures._waiting)


def frozen(rank: Any) -> int:
    """Elements that wait in captures."""
    held, count = rank._storage._captures._waiting, 0
    for capture_id, one in held.items():
        tensors = one.frozen.on_host()  # once: so they are put back
        held[capture_id] = dataclasses.replace(one, frozen=Frozen(lambda tensors=tensors: tensors))
        count += sum(t.numel() for t in tensors.values())
    return count


def save(ranks: World, kind: str, name: str) -> Published:
    captured = "training" if kind == "weights" else "sampler"
    ranks.call(execute, Capture(model_id="m", kind=captured, capture_id=name))  # type: ignore[arg-type]
    if kind == "weights":
        shares = ranks.call(frozen)
        whole = sum(t.numel() for t in flat_tensors(ranks.state("m")).values())
        assert sum(shares) == whole, "each tensor is frozen by one rank, however many hold it"
        assert max(shares) < 2 * whole / len(shares)
    outcomes = ranks.call(persist, name, kind, name)
    assert ranks.call(waiting) == [0] * ranks.definition.topology.world_size
    return outcomes[0]


def load(ranks: World) -> None:
    """Into a model that was made with another seed, so that nothing but the checkpoint can be right."""
    ranks.call(
        execute,
        CreateAdapter(model_id="m", spec=ref.spec(4, seed=99), drawn_seed=0),  # type: ignore[arg-type]
    )
    ranks.call(fetch)
    ranks.call(
        execute,
        Load(model_id="m", source=SOURCE, with_optimizer=True, fetch_id="f"),  # type: ignore[arg-type]
    )


def train(ranks: World, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        (output,) = ranks.run(ref.item("m", DATA))
        assert output.error is None
        losses.append(output.metrics["loss:sum"])
        ranks.step("m", ref.ADAM)
    return losses


class Saved:
    """What ranks in TP2 x DP2 left behind, and how they went on."""

    def __init__(self, definition: Definition, folder: Path) -> None:
        with world(laid_out(definition, tp=2, dp=2), folder) as ranks:
            ranks.create("m", ref.spec(4, seed=1))
            train(ranks, 2)
            self.state = ranks.state("m")
            self.published = save(ranks, "weights", "two")
            self.snapshot = save(ranks, "sampler_weights", "two")
            self.losses = train(ranks, 2)


@pytest.fixture(scope="module")
def saved(definition: Definition, folder: Path) -> Saved:
    return Saved(definition, folder)


def assert_same(one: AdapterState, other: AdapterState) -> None:
    assert one.optimizer_step == other.optimizer_step
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        ours, theirs = getattr(one, part), getattr(other, part)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), part


def test_b31_all_shards_are_there_and_counted_and_hold_the_whole_adapter(
    saved: Saved, folder: Path
) -> None:
    volume = LocalVolume(folder / "checkpoints")
    assert_same(load_training(volume, SOURCE), saved.state)
    manifest = open_named(volume, "m", "weights", "two", verify="full").manifest
    assert manifest.layout == {"tp": 2, "cp": 1, "dp": 2}
    assert [receipt.rank for receipt in manifest.receipts] == [0, 1, 2, 3]


def test_b36_every_file_has_one_writer(saved: Saved, folder: Path) -> None:
    volume = LocalVolume(folder / "checkpoints")
    manifest = open_named(volume, "m", "weights", "two").manifest
    written = [path for receipt in manifest.receipts for path in receipt.files]
    assert sorted(written) == sorted({entry.path for entry in manifest.files})


def test_a_snapshot_has_the_parts_of_all_tensor_parallel_ranks_and_can_be_read_at_once(
    saved: Saved,
) -> None:
    tensors = load_file(Path(saved.snapshot.folder) / "adapter_model.safetensors")
    assert len(tensors) == len(saved.state.weights)
    for name, tensor in saved.state.weights.items():
        assert torch.equal(tensors[f"base_model.model.{name}.weight"], tensor)


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "dp": 2}, {"tp": 4}, {"dp": 4}, {"cp": 2}, {}],
    ids=["the same", "TP4", "DP4", "CP2", "TP1"],
)
def test_a_checkpoint_of_tp2_x_dp2_goes_on_in_another_layout(
    saved: Saved, definition: Definition, folder: Path, layout: dict[str, int]
) -> None:
    with world(laid_out(definition, **layout), folder) as ranks:  # type: ignore[arg-type]
        load(ranks)
        assert_same(ranks.state("m"), saved.state)  # and that replicas are equal
        losses = train(ranks, 2)
    if layout == {"tp": 2, "dp": 2}:
        assert losses == saved.losses
    assert losses == pytest.approx(saved.losses, rel=TOLERANCE)
