"""SharedVolume: the contract of every volume, locks between hosts, and looks that do not trust a cache."""

import json
import os
import subprocess
import sys
import threading

import pytest
from lilo_volume import LocalVolume, LockTimeout, SoloGroup, begin, catalogue
from lilo_volume.testing import VOLUME_CONTRACT
from lilo_volume.volumes.shared import SharedVolume


@pytest.fixture
def shared(tmp_path):
    return SharedVolume(tmp_path / "volume")


@pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
def test_a_shared_directory_keeps_the_contract_of_a_volume(check, shared):
    check(shared)


HOLDER = """
import sys; from lilo_volume.volumes.shared import SharedVolume
with SharedVolume(sys.argv[1], lease_s=0.5).exclusive('name', timeout_s=5):
    print('held', flush=True); sys.stdin.read()
"""


def test_a_lock_is_held_between_hosts_and_free_after_its_holder_died(shared):
    # The kernel's own locks are not used: a process that was killed leaves its lock file behind, as a lost host does.
    volume = SharedVolume(shared.root, lease_s=0.5)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(shared.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        # Longer than a lease: a holder that lives is never taken for dead.
        with (
            pytest.raises(LockTimeout),
            volume.exclusive("name", timeout_s=1.2),
        ):
            pass
        process.kill()
        process.wait(timeout=10)
    assert list((shared.root / ".lilo-locks").iterdir())
    with volume.exclusive("name", timeout_s=10):
        pass
    assert list((shared.root / ".lilo-locks").iterdir()) == []


def test_of_many_that_wait_for_a_dead_holder_one_at_a_time_gets_the_lock(shared):
    with shared.exclusive("name", timeout_s=1):
        (lock,) = (shared.root / ".lilo-locks").iterdir()
        dead = lock.read_bytes()
    lock.write_bytes(dead)
    volume = SharedVolume(shared.root, lease_s=0.2)
    inside, most = [], []
    guard = threading.Lock()

    def take():
        with volume.exclusive("name", timeout_s=20):
            with guard:
                inside.append(1)
                most.append(len(inside))
            with guard:
                inside.pop()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6


LOOKER = """
import json, sys
from lilo_volume.volumes.shared import SharedVolume
volume = SharedVolume(sys.argv[1])
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "os.scandir") else None)
entries = volume.list_committed("a/b")
data = volume.read_committed("a/b/file")
print(json.dumps([opened, [e.size_bytes for e in entries], data.decode()]))
"""


def test_every_look_opens_the_folders_on_its_way_and_files_that_changed_lately(shared):
    # On NFS, opening is what makes a host ask the server; a plain stat may be answered by its cache.
    (shared.root / "a/b").mkdir(parents=True)
    (shared.root / "a/b/file").write_bytes(b"12")
    run = subprocess.run(
        [sys.executable, "-c", LOOKER, str(shared.root)],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    opened, sizes, data = json.loads(run.stdout)
    assert (sizes, data) == ([2], "12")
    root = str(shared.root)
    for path in (root, f"{root}/a", f"{root}/a/b"):
        assert opened.count(path) >= 2, path
    assert opened.index(root) < opened.index(f"{root}/a") < opened.index(f"{root}/a/b")
    assert opened.count(f"{root}/a/b/file") == 2


def test_what_a_file_system_keeps_of_a_removed_open_file_is_no_file(shared):
    (shared.root / "a").mkdir()
    (shared.root / "a/.nfs000000001").write_bytes(b"open elsewhere")
    (shared.root / "a/x").write_bytes(b"1")
    assert [entry.path for entry in shared.list_committed("")] == ["a/x"]


def test_two_hosts_publish_in_turn(shared):
    other = SharedVolume(shared.root)
    for number, volume in enumerate([shared, other, shared]):
        with begin(
            volume,
            SoloGroup(),
            collection="run",
            kind="weights",
            name="one",
            order=number,
            overwrite=True,
        ) as attempt:
            with attempt.create("0") as file:
                file.write(b"%d" % number)
            attempt.publish()
    assert [item.publication.order for item in catalogue(other)] == [2]
    assert catalogue(LocalVolume(shared.root)) == catalogue(shared)
    assert os.listdir(shared.root / ".lilo-locks") == []
