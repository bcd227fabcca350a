"""Snapshots that this machine's view of the volume does not have yet are brought there before they are sampled from."""

import shutil

import pytest
from lilo_engine.errors import NotFound
from lilo_engine.sampling.residents import AdapterVersion
from lilo_engine.sampling.snapshots import Snapshots
from lilo_engine.storage import open_folder
from lilo_volume import SoloGroup, begin
from lilo_volume.testing.emulator import Emulator


def publish(volume) -> AdapterVersion:
    with begin(
        volume, SoloGroup(), collection="r:train:0", kind="sampler_weights", name="s", order=1
    ) as attempt:
        with attempt.create("adapter_config.json") as file:
            file.write(b"{}")
        checkpoint = attempt.publish()
    attempt_id = checkpoint.publication.attempt
    return AdapterVersion(
        name=f"tinker://r:train:0/sampler_weights/s@{attempt_id}", folder=str(checkpoint.folder)
    )


def test_what_another_machine_published_is_there_when_it_is_asked_for(tmp_path, monkeypatch):
    emulator = Emulator(tmp_path / "emulated", shared=True)
    here, there = emulator.mount("here"), emulator.mount("there")
    version = publish(emulator.volume(there))
    relative = version.folder.removeprefix(str(there.root))
    mine = AdapterVersion(name=version.name, folder=f"{here.root}{relative}")
    monkeypatch.setenv("LILO_CHECKPOINT_VOLUME", f"emulator://{tmp_path}/emulated")
    monkeypatch.setattr("lilo_engine.storage.node_id", lambda: here.task_id)
    assert not (here.root / relative[1:]).exists()
    assert Snapshots(tmp_path / "unused").see(mine) == mine.folder
    assert (here.root / relative[1:] / "adapter_config.json").read_bytes() == b"{}"
    reloads = here.calls["reload"]
    assert Snapshots(tmp_path / "unused").see(mine) == mine.folder
    assert here.calls["reload"] == reloads


def test_what_lies_in_an_object_store_is_fetched_again_after_its_folder_was_lost(
    tmp_path, monkeypatch
):
    url, root = f"file://{tmp_path}/store", tmp_path / "checkpoints"
    version = publish(open_folder(url, root))
    shutil.rmtree(root)
    monkeypatch.setenv("LILO_CHECKPOINT_VOLUME", url)
    Snapshots(root).see(version)
    assert (root / version.folder / "adapter_config.json").read_bytes() == b"{}"


def test_a_folder_that_the_records_have_from_another_place_is_told_anew(tmp_path):
    version = publish(open_folder(None, tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    folder = Snapshots(tmp_path / "after").see(version)
    assert folder == version.folder.replace("/before/", "/after/")


def test_a_snapshot_that_was_replaced_is_not_found(tmp_path):
    version = publish(open_folder(None, tmp_path))
    other = AdapterVersion(name=f"{version.name[:-1]}x", folder=f"{version.folder}x")
    with pytest.raises(NotFound, match="replaced"):
        Snapshots(tmp_path).see(other)


def test_a_snapshot_that_is_gone_is_not_found(tmp_path):
    version = publish(open_folder(None, tmp_path))
    shutil.rmtree(tmp_path)
    with pytest.raises(NotFound):
        Snapshots(tmp_path).see(version)
