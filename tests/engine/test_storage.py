"""Which medium a folder of checkpoints lies on, as `LILO_CHECKPOINT_VOLUME` names it."""

import subprocess
import sys

import pytest
from lilo_engine.storage import open_folder
from lilo_volume import LocalVolume, SharedVolume, SoloGroup, VolumeError, begin, open_named
from lilo_volume.errors import InvalidPath
from lilo_volume.testing.emulator import Emulator

SAVE = """
import sys
from pathlib import Path
from lilo_engine.storage import open_checkpoints
from lilo_volume import SoloGroup, begin

volume = open_checkpoints(Path(sys.argv[1]))
with begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1) as attempt:
    with attempt.create("file") as file:
        file.write(b"from another process")
    attempt.publish()
"""


def test_no_name_is_a_plain_folder_and_shared_is_one_that_several_hosts_mount(tmp_path):
    assert type(open_folder(None, tmp_path / "a")) is LocalVolume
    volume = open_folder("shared://", tmp_path / "b")
    assert (type(volume), volume.root) == (SharedVolume, tmp_path / "b")


def test_an_object_store_is_named_by_its_url(tmp_path):
    volume = open_folder(f"file://{tmp_path}/store", tmp_path / "staging")
    with begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1) as attempt:
        with attempt.create("file") as file:
            file.write(b"bytes")
        attempt.publish()
    assert list((tmp_path / "store").rglob("file"))
    other = open_folder(f"file://{tmp_path}/store", tmp_path / "elsewhere")
    checkpoint = open_named(other, "c", "k", "n", verify="full")
    assert (checkpoint.folder / "file").read_bytes() == b"bytes"


def test_processes_of_two_containers_have_views_of_their_own_of_an_emulated_volume(tmp_path):
    emulator = Emulator(tmp_path / "emulated", shared=True)
    here, there = emulator.mount("a"), emulator.mount("b")
    url = f"emulator://{tmp_path}/emulated?commit_reload=on"
    subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path / "unused")],
        env={"LILO_CHECKPOINT_VOLUME": url, "MODAL_TASK_ID": there.task_id},
        check=True,
        timeout=60,
    )
    assert list(there.root.rglob("file"))
    assert not list(here.root.rglob("file"))
    checkpoint = open_named(emulator.volume(here), "c", "k", "n", verify="full")
    assert checkpoint.folder.is_relative_to(here.root)


@pytest.mark.parametrize(
    "name",
    ["emulator://relative", "emulator:///x?no_such_mode=1", "shared:///elsewhere", "no-such://x"],
)
def test_what_is_no_medium_is_refused_by_its_name(name, tmp_path):
    with pytest.raises((InvalidPath, VolumeError)) as refusal:
        open_folder(name, tmp_path / "root")
    assert name in str(refusal.value)
