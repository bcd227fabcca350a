"""ModalVolume against a server that speaks the real client's protocol: the contract, exact errors, call counts."""

import json
import os
import subprocess
import sys

import modal
import pytest
from grpclib import Status
from lilo_volume import (
    FileMissing,
    SoloGroup,
    VolumeBusy,
    VolumeConflict,
    VolumeFull,
    VolumeUnavailable,
    begin,
    latest,
    open_named,
)
from lilo_volume.testing import VOLUME_CONTRACT
from lilo_volume.testing.threads import run_ranks
from lilo_volume.volumes.modal import ModalVolume, unmounted
from lilo_volume.volumes.modal_mounts import ModalMount, check_mounts, mounts_of

from tests.volume.fake_modal import NAME, FakeModal


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def server(request, monkeypatch):
    with FakeModal(version=request.param).running() as server:
        monkeypatch.setenv("MODAL_SERVER_URL", server.url)
        yield server


@pytest.fixture
def volume(server, tmp_path):
    return ModalVolume(server.mount(tmp_path / "mount"), tmp_path / "mount")


@pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
def test_a_modal_volume_keeps_the_contract_of_a_volume(check, volume):
    check(volume)


def save(volume, group, node, *, name="one", data=b"shard", **options):
    with begin(
        volume,
        group,
        collection="run",
        kind="weights",
        name=name,
        order=1,
        node=node,
        timeout_s=20,
        **options,
    ) as attempt:
        with attempt.create(f"shard-{group.rank}") as file:
            file.write(data + str(group.rank).encode())
        return attempt.publish(expected=[f"shard-{rank}" for rank in range(group.world_size)])


def two_nodes(server, tmp_path):
    """Two containers, each with its own mount and view."""
    places = [tmp_path / "node-0", tmp_path / "node-1"]
    return [ModalVolume(server.mount(place), place) for place in places]


def test_two_nodes_publish_without_a_reload_and_without_a_copy(server, tmp_path):
    volumes = two_nodes(server, tmp_path)
    results = run_ranks(2, lambda group: save(volumes[group.rank], group, f"n{group.rank}"))
    assert results[0] == results[1] or results[0].manifest == results[1].manifest
    reads_and_commits = set(server.calls) - {"VolumeGetOrCreate"}
    assert reads_and_commits <= {
        "VolumeCommit",
        "VolumeGetFile2",
        "VolumeListFiles",
        "VolumeListFiles2",
    }
    # The attempt's note, the shards of each node, the manifest.
    assert server.calls["VolumeCommit"] == 4
    # What rank 0 wrote is in its own view, and a third container finds everything.
    assert (results[0].folder / "shard-0").read_bytes() == b"shard0"
    third = ModalVolume(server.mount(tmp_path / "third"), tmp_path / "third")
    found = open_named(third, "run", "weights", "one", verify="full")
    assert [(found.folder / f"shard-{i}").read_bytes() for i in (0, 1)] == [b"shard0", b"shard1"]


def test_a_commit_that_reloads_and_is_refused_has_published_all_the_same(server, volume):
    server.skip_reload = False
    held = volume.root / "held"
    held.write_bytes(b"1")
    with held.open("rb"), pytest.raises(VolumeBusy) as caught:
        volume.commit()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert server.committed == {"held": b"1"}


def test_an_engine_that_holds_a_file_open_never_costs_a_save(server, tmp_path):
    server.skip_reload = False
    volumes = two_nodes(server, tmp_path)
    held = tmp_path / "node-0" / "capture"
    held.write_bytes(b"1")
    with held.open("rb"):
        results = run_ranks(2, lambda group: save(volumes[group.rank], group, f"n{group.rank}"))
    assert results[0].manifest == results[1].manifest


def test_a_reload_with_a_file_open_is_busy_and_changes_nothing(server, volume):
    server.committed["new"] = b"1"
    held = volume.root / "held"
    held.write_bytes(b"1")
    with held.open("rb"), pytest.raises(VolumeBusy):
        volume.reload()
    assert not (volume.root / "new").exists()
    volume.reload()
    assert (volume.root / "new").read_bytes() == b"1"


REFUSALS = [
    ("FAILED_PRECONDITION", VolumeConflict),
    ("ABORTED", VolumeConflict),
    ("RESOURCE_EXHAUSTED", VolumeFull),
    ("PERMISSION_DENIED", VolumeUnavailable),
    ("UNAUTHENTICATED", VolumeUnavailable),
    ("INVALID_ARGUMENT", VolumeUnavailable),
    ("DATA_LOSS", VolumeUnavailable),
]


@pytest.mark.parametrize(("status", "expected"), REFUSALS)
def test_each_refusal_is_the_same_error_from_every_call(server, volume, status, expected):
    (volume.root / "a").write_bytes(b"1")
    volume.commit()
    calls = {
        "VolumeCommit": volume.commit,
        "VolumeReload": volume.reload,
        "VolumeListFiles": lambda: volume.list_committed(""),
        "VolumeGetFile2": lambda: volume.read_committed("a"),
        "VolumeCopyFiles": lambda: volume.copy_committed(["a"], "b"),
        "VolumeRemoveFile": lambda: volume.remove_committed("a", recursive=True),
    }
    for call, action in calls.items():
        two = call in ("VolumeListFiles", "VolumeCopyFiles", "VolumeRemoveFile")
        name = f"{call}2" if two and server.version == 2 else call
        server.fail(name, Status[status])
        with pytest.raises(expected) as caught:
            action()
        assert caught.value.__cause__ is not None, call


def test_what_is_not_there_is_missing_from_every_call(server, volume):
    server.fail("VolumeCommit", Status.NOT_FOUND, "volume not found")
    server.fail("VolumeReload", Status.NOT_FOUND, "volume not found")
    for action in (
        volume.commit,
        volume.reload,
        lambda: volume.read_committed("no"),
        lambda: volume.copy_committed(["no"], "b"),
        lambda: volume.remove_committed("no"),
    ):
        with pytest.raises(FileMissing):
            action()
    assert volume.list_committed("no") == []


def test_a_server_that_is_down_is_unavailable_after_the_client_tried_again(server, volume):
    server.fail("VolumeReload", Status.UNAVAILABLE, times=20)
    with pytest.raises(VolumeUnavailable):
        volume.reload()
    assert server.calls["VolumeReload"] > 1


def test_a_commit_whose_answer_was_lost_is_sent_again_by_the_client(server, volume):
    (volume.root / "a").write_bytes(b"1")
    server.fail("VolumeCommit", Status.UNAVAILABLE, applied=True)
    volume.commit()
    assert server.committed == {"a": b"1"}
    assert server.calls["VolumeCommit"] == 2


def test_a_refused_manifest_is_no_checkpoint_and_a_lost_answer_is_one(server, volume):
    def fail_the_manifest(**how):
        def on_step(step):
            if str(getattr(step, "name", step)).startswith("commit manifest"):
                server.fail("VolumeCommit", Status.ABORTED, **how)

        return on_step

    save(volume, SoloGroup(), "n0", name="lost", on_step=fail_the_manifest(applied=True))
    assert latest(volume, "run", "weights", verify="full").checkpoint is not None
    assert server.faults["VolumeCommit"] == [], "no step was seen: the test tests nothing"


def test_a_volume_that_does_not_exist_is_missing_and_is_not_made(server, tmp_path):
    handle = modal.Volume.from_name("no-such", client=server.client("ak-x"))
    volume = ModalVolume(handle, tmp_path)
    with pytest.raises(FileMissing):
        volume.read_committed("a")
    assert server.calls["VolumeGetOrCreate"] == 1


def test_a_mount_that_is_no_folder_is_said_at_once(server, tmp_path):
    with pytest.raises(VolumeUnavailable):
        ModalVolume(server.outside(), tmp_path / "not-mounted")


def test_a_part_of_a_volume_can_be_mounted(server, tmp_path):
    server.committed |= {"part/a/x": b"1", "other": b"2"}
    volume = ModalVolume(server.outside(), tmp_path, sub_path="/part/")
    assert [entry.path for entry in volume.list_committed("")] == ["a/x"]
    assert volume.read_committed("a/x") == b"1"
    volume.copy_committed(["a/x"], "b")
    volume.remove_committed("a", recursive=True)
    assert server.committed == {"part/b/x": b"1", "other": b"2"}


def test_many_files_are_copied_in_two_calls(server, volume):
    server.committed |= {f"a/{i}": b"1" for i in range(5)}
    volume.copy_committed([f"a/{i}" for i in range(5)], "b")
    volume.copy_committed([f"a/{i}" for i in range(5)], "b")
    assert sum(count for call, count in server.calls.items() if "Copy" in call) == 3
    assert [entry.path for entry in volume.list_committed("b")] == [f"b/{i}" for i in range(5)]


def test_a_laptop_reads_and_writes_the_volume_without_a_mount(server, tmp_path):
    volumes = two_nodes(server, tmp_path)
    run_ranks(2, lambda group: save(volumes[group.rank], group, f"n{group.rank}"))
    laptop = unmounted(server.outside(), tmp_path / "staging")
    found = open_named(laptop, "run", "weights", "one", verify="full")
    assert (found.folder / "shard-1").read_bytes() == b"shard1"
    if server.version == 2:  # the server of the tests takes no uploads of the first version
        save(laptop, SoloGroup(), "laptop", name="two", data=b"x" * 9_000_000)
        assert open_named(volumes[0], "run", "weights", "two", verify="full").size_bytes > 9_000_000


def test_the_mounts_of_a_function_are_told_without_an_account():
    app = modal.App("train")
    image = modal.Image.debian_slim()
    whole = modal.Volume.from_name("checkpoints")
    part = modal.Volume.from_name("data").with_mount_options(read_only=True, sub_path="set")

    @app.function(image=image, volumes={"/checkpoints": whole, "/data": part}, serialized=True)
    def train():
        pass

    assert mounts_of(train) == (
        ModalMount(path="/checkpoints", name="checkpoints", read_only=False, sub_path=None),
        ModalMount(path="/data", name="data", read_only=True, sub_path="set"),
    )
    check_mounts(train, {"/checkpoints": "checkpoints"})
    for wrong in (
        {"/checkpoints": "bulletin"},
        {"/nowhere": "checkpoints"},
        {"/data": "data"},
    ):
        with pytest.raises(VolumeUnavailable):
            check_mounts(train, wrong)


def test_a_cluster_is_one_function_whose_mounts_hold_for_every_node():
    app = modal.App("train")
    volume = modal.Volume.from_name("checkpoints")

    @app.function(gpu="H100:8", volumes={"/checkpoints": volume}, serialized=True)
    @modal.clustered(size=2, rdma=True)
    def train():
        pass

    check_mounts(train, {"/checkpoints": "checkpoints"})
    assert train.info().cluster_info.size == 2


def test_the_command_works_on_a_volume_by_its_name(server, tmp_path):
    mounted = tmp_path / "mount"
    save(ModalVolume(server.mount(mounted), mounted), SoloGroup(), "n0")
    env = {
        **os.environ,
        "MODAL_SERVER_URL": server.url,
        "MODAL_TOKEN_ID": "ak-laptop",
        "MODAL_TOKEN_SECRET": "as-secret",
    }

    def ask(*arguments):
        run = subprocess.run(
            [sys.executable, "-m", "lilo_volume.cli", *arguments, "--json"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return run.returncode, json.loads(run.stdout) if run.stdout else run.stderr

    root = f"modal://{NAME}"
    code, listed = ask("ls", root)
    assert (code, [item["name"] for item in listed["checkpoints"]]) == (0, ["one"]), listed
    out = tmp_path / "out"
    assert ask("pull", root, "run", "weights", "one", str(out))[0] == 0
    assert (out / "shard-0").read_bytes() == b"shard0"
    assert ask("ls", "modal://no-such")[0] == 1
    assert server.calls["VolumeReload"] == server.calls["VolumeCopyFiles2"] == 0
