"""Training checkpoints: bit for bit back, read by torch's own loader, and refused when anything is wrong."""

import dataclasses
import io
import json
import os
import pickle
import pickletools
import resource
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lilo_engine.errors import CommandFailed, InvalidRequest, NotFound
from lilo_engine.operations.lora_metadata import lora_from_metadata
from lilo_engine.operations.reference import CheckpointRef
from lilo_miles_backend.checkpoints import load_training, persist_sampler, persist_training
from lilo_volume import Attempt, SoloGroup, begin, catalogue, open_named
from lilo_volume.testing import run_ranks
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.miles_backend.checkpoints.conftest import (
    assert_equal_states,
    destination,
    make_state,
)

REF = CheckpointRef(run_id="0ab:train:0", kind="weights", name="one")
PARTS = ("weights", "exp_avg", "exp_avg_sq")


def save(volume, state, **options):
    return persist_training(volume, SoloGroup(), state, destination(**options))


@pytest.mark.parametrize("seed", [7, None])
def test_a_saved_state_comes_back_bit_for_bit(volume, seed):
    state = make_state(seed=seed)
    save(volume, state)
    assert_equal_states(state, load_training(volume, REF))


def test_special_values_and_views_come_back_bit_for_bit(volume):
    state = make_state(lora_rank=1)
    name = next(iter(state.weights))
    wide = torch.arange(512.0).view(4, 128)
    weights = dict(state.weights) | {name: wide[2:3]}
    weights["lm_head.lora_B"] = torch.tensor([[float("inf")], [-0.0], [1e-45], [3.4e38]] * 65)
    state = dataclasses.replace(state, weights=weights)
    published = save(volume, state)
    back = load_training(volume, REF)
    for key in (name, "lm_head.lora_B"):
        assert back.weights[key].numpy().tobytes() == weights[key].contiguous().numpy().tobytes()
    # A view must not drag the slots around it into the checkpoint.
    assert published.size_bytes < 3 * sum(t.numel() * 4 for t in weights.values()) + 2_000_000


def test_without_the_optimizer_moments_are_zero(volume, state):
    save(volume, state)
    back = load_training(volume, REF, with_optimizer=False)
    assert back.optimizer_step == 0
    assert all(torch.equal(back.weights[k], t) for k, t in state.weights.items())
    assert not any(t.any() for part in PARTS[1:] for t in getattr(back, part).values())


def test_what_is_published_can_be_listed_without_reading_tensors(volume, state):
    published = save(volume, state)
    (checkpoint,) = catalogue(volume)
    metadata = checkpoint.manifest.metadata
    assert lora_from_metadata(metadata) == state.spec
    assert metadata["base_model"] == "tiny"
    assert metadata["optimizer_step"] == "11"
    assert metadata["user_metadata"] == '{"by": "me"}'
    assert checkpoint.publication.order == 5
    assert published.digest == checkpoint.manifest.digest
    assert published.folder == str(checkpoint.folder)
    assert published.size_bytes == sum(e.size_bytes for e in checkpoint.manifest.files)
    document = json.loads((checkpoint.folder / "checkpoint.json").read_bytes())
    assert document["topology"] == {"tp": 1, "cp": 1, "dp": 1}
    assert {entry.path for entry in checkpoint.manifest.files} == {
        ".metadata",
        "__0_0.distcp",
        "checkpoint.json",
    }


def test_torch_itself_loads_the_shards(volume, state):
    published = save(volume, state)
    target = {f"weights.{name}": torch.zeros_like(tensor) for name, tensor in state.weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.load(target, checkpoint_id=published.folder, no_dist=True)
    assert all(torch.equal(target[f"weights.{k}"], t) for k, t in state.weights.items())


def test_several_ranks_share_the_writing_and_one_rank_reads_it(volume, state):
    outcomes = run_ranks(3, lambda group: persist_training(volume, group, state, destination()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    found = open_named(volume, REF.run_id, REF.kind, REF.name, verify="full")
    shards = {e.path for e in found.manifest.files if e.path.endswith(".distcp")}
    assert len(shards) > 1
    assert_equal_states(state, load_training(volume, REF))


def test_a_rank_that_cannot_write_fails_all_and_nothing_is_published(volume, state, monkeypatch):
    def create(self, file_name):
        if file_name.startswith("__1_"):
            raise OSError(28, "No space left on device")
        return whole(self, file_name)

    whole = Attempt.create
    monkeypatch.setattr(Attempt, "create", create)
    outcomes = run_ranks(3, lambda group: persist_training(volume, group, state, destination()))
    assert [type(outcome) for outcome in outcomes] == [CommandFailed] * 3
    assert all("rank 1" in str(outcome) for outcome in outcomes)
    assert volume.list_committed("") == []


def test_a_taken_name_is_the_users_error_and_overwriting_replaces(volume, state):
    save(volume, state)
    with pytest.raises(InvalidRequest):
        save(volume, state)
    later = dataclasses.replace(state, optimizer_step=12)
    save(volume, later, overwrite=True)
    assert load_training(volume, REF).optimizer_step == 12
    assert len(catalogue(volume)) == 1


def test_snapshots_and_checkpoints_of_one_name_are_two_things(volume, state):
    save(volume, state)
    persist_sampler(volume, SoloGroup(), state, destination("sampler_weights"))
    assert_equal_states(state, load_training(volume, REF))
    with pytest.raises(InvalidRequest):
        load_training(volume, dataclasses.replace(REF, kind="sampler_weights"))


def test_an_unknown_checkpoint_is_not_found(volume, state):
    save(volume, state)
    with pytest.raises(NotFound):
        load_training(volume, dataclasses.replace(REF, name="two"))


def test_a_state_that_is_not_whole_is_refused_and_nothing_is_published(volume, state):
    name = next(iter(state.weights))
    less = {k: t for k, t in state.exp_avg.items() if k != name}
    for broken in (
        dataclasses.replace(state, weights={}, exp_avg={}, exp_avg_sq={}),
        dataclasses.replace(state, exp_avg=less),
        dataclasses.replace(state, exp_avg_sq=dict(state.exp_avg_sq) | {name: torch.zeros(2, 2)}),
    ):
        with pytest.raises(CommandFailed):
            save(volume, broken)
    assert catalogue(volume) == []


def test_a_full_disk_is_an_error_of_the_command_and_nothing_is_published(
    volume, state, monkeypatch
):
    def full(file_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lilo_volume.files.os.fsync", full)
    with pytest.raises(CommandFailed):
        save(volume, state)
    monkeypatch.undo()
    assert catalogue(volume) == []
    save(volume, state)


def test_a_shard_that_finds_no_room_half_way_says_what_the_system_said(volume, state):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(CommandFailed, match="File too large"):
            save(volume, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert catalogue(volume) == []


@pytest.mark.parametrize("file_name", ["__0_0.distcp", ".metadata", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_file_is_refused(volume, state, file_name, damage):
    path = os.path.join(save(volume, state).folder, file_name)
    if damage == "delete":
        os.unlink(path)
    elif damage == "truncate":
        os.truncate(path, os.path.getsize(path) - 3)
    else:
        with open(path, "r+b") as file:
            byte = file.read(1)[0]
            file.seek(0)
            file.write(bytes([byte ^ 1]))
    with pytest.raises(CommandFailed):
        load_training(volume, REF)


def test_stray_files_are_ignored(volume, state):
    folder = save(volume, state).folder
    for name in ("__1_0.distcp", "checkpoint.json.tmp", "notes"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(b"of another attempt")
    assert_equal_states(state, load_training(volume, REF))


def republish(volume, state, **changed: bytes | None) -> CheckpointRef:
    """A checkpoint with sound digests whose files somebody has changed: `metadata`, `shard`, `document`, `extra`."""
    names = {
        "metadata": ".metadata",
        "shard": "__0_0.distcp",
        "document": "checkpoint.json",
        "extra": "extra",
    }
    folder = volume.root / save(volume, state, name="source", overwrite=True).folder
    files = {name: (folder / name).read_bytes() for name in list(names.values())[:3]}
    files |= {names[key]: data for key, data in changed.items()}
    attempt = begin(
        volume,
        SoloGroup(),
        collection=REF.run_id,
        kind="weights",
        name="forged",
        order=1,
        overwrite=True,
    )
    for name, data in files.items():
        if data is not None:
            with attempt.create(name) as file:
                file.write(data)
    attempt.publish()
    return dataclasses.replace(REF, name="forged")


def metadata_of(volume, state):
    folder = volume.root / save(volume, state, name="source", overwrite=True).folder
    return pickle.loads((folder / ".metadata").read_bytes())


class Exploit:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


def test_a_pickle_that_runs_code_is_refused_before_it_runs(volume, state, tmp_path):
    target = tmp_path / "ran"
    found = metadata_of(volume, state)
    found.planner_data = Exploit(str(target))
    for hostile in (pickle.dumps(Exploit(str(target))), pickle.dumps(found)):
        assert "system" in str(list(pickletools.genops(hostile)))
        with pytest.raises(CommandFailed):
            load_training(volume, republish(volume, state, metadata=hostile))
    assert not target.exists()


def test_bytes_in_place_of_a_tensor_are_refused_since_torch_would_unpickle_them(
    volume, state, tmp_path
):
    target = tmp_path / "ran"
    found = metadata_of(volume, state)
    key = next(iter(found.state_dict_metadata))
    found.state_dict_metadata[key] = BytesStorageMetadata()
    buffer = io.BytesIO()
    torch.save(Exploit(str(target)), buffer)
    info = next(iter(found.storage_data.values()))
    found.storage_data[MetadataIndex(key)] = dataclasses.replace(
        info, offset=0, length=len(buffer.getvalue())
    )
    with pytest.raises(CommandFailed):
        load_training(
            volume, republish(volume, state, metadata=pickle.dumps(found), shard=buffer.getvalue())
        )
    assert not target.exists()


def test_a_metadata_that_cannot_be_true_is_refused(volume, state):
    def huge(found):
        next(iter(found.state_dict_metadata.values())).size = torch.Size([2**20, 2**20])

    def other_dtype(found):
        next(iter(found.state_dict_metadata.values())).properties.dtype = None

    def outside(found):
        next(iter(found.storage_data.values())).relative_path = "../../secret"

    def elsewhere(found):
        next(iter(found.storage_data.values())).length += 10**6

    def unhashable(found):
        found.storage_data = [1]

    def missing(found):
        found.storage_data.pop(next(iter(found.storage_data)))

    for change in (huge, other_dtype, outside, elsewhere, unhashable, missing):
        found = metadata_of(volume, state)
        change(found)
        with pytest.raises(CommandFailed):
            load_training(volume, republish(volume, state, metadata=pickle.dumps(found)))


@pytest.mark.parametrize(
    "changed",
    [
        {"metadata": b""},
        {"metadata": b"\x80\x04."},
        {"metadata": pickle.dumps({"a": 1})},
        {"metadata": None},
        {"document": None},
        {"document": b"{}"},
        {"document": b"\xff"},
        {"extra": b"unexpected"},
        {"shard": b"short"},
    ],
    ids=str,
)
def test_files_that_do_not_belong_together_are_refused(volume, state, changed):
    with pytest.raises(CommandFailed):
        load_training(volume, republish(volume, state, **changed))


def test_a_document_of_another_adapter_is_refused(volume, state):
    folder = volume.root / save(volume, state, name="source").folder
    document = json.loads((folder / "checkpoint.json").read_bytes())
    document["lora"]["lora_rank"] = 4
    with pytest.raises(CommandFailed):
        load_training(volume, republish(volume, state, document=json.dumps(document).encode()))


def test_checkpoints_do_not_need_megatron():
    probe = "import sys, lilo_miles_backend.checkpoints as c; assert 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
