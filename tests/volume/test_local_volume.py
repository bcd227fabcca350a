"""LocalVolume: the contract of every volume, and what only a directory can get wrong."""

import os
import subprocess
import sys

import pytest
from lilo_volume import FileMissing, InvalidPath, LocalVolume, LockTimeout
from lilo_volume.testing import VOLUME_CONTRACT


@pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
def test_a_directory_keeps_the_contract_of_a_volume(check, volume):
    check(volume)


def test_a_link_that_leaves_the_volume_is_refused(volume, tmp_path):
    (tmp_path / "secret").write_bytes(b"key")
    os.symlink(tmp_path, volume.root / "out")
    os.symlink(tmp_path / "secret", volume.root / "direct")
    with pytest.raises(InvalidPath):
        volume.read_committed("out/secret")
    with pytest.raises(InvalidPath):
        volume.read_committed("direct")
    assert volume.list_committed("") == []


def test_a_link_inside_the_volume_is_no_file(volume):
    (volume.root / "real").write_bytes(b"1")
    os.symlink("real", volume.root / "link")
    with pytest.raises(FileMissing):
        volume.read_committed("link")
    assert [entry.path for entry in volume.list_committed("")] == ["real"]


def test_a_root_that_is_a_link_works(volume, tmp_path):
    os.symlink(volume.root, tmp_path / "alias")
    (volume.root / "x").write_bytes(b"1")
    assert LocalVolume(tmp_path / "alias").read_committed("x") == b"1"


def test_a_file_as_root_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidPath):
        LocalVolume(tmp_path / "file")


def test_the_lock_of_a_dead_process_is_free(volume):
    holder = (
        "import os, sys; from lilo_volume import LocalVolume\n"
        "with LocalVolume(sys.argv[1]).exclusive('name', timeout_s=5):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(volume.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(LockTimeout),
            volume.exclusive("name", timeout_s=0.05),
        ):
            pass
        process.kill()
        process.wait(timeout=10)
        with volume.exclusive("name", timeout_s=5):
            pass
