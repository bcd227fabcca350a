"""The emulator beyond the vectors: the contract of every volume, and the rules that need threads, time or room."""

import os
import subprocess
import sys
import threading

import pytest
from lilo_volume import (
    FileMissing,
    InvalidPath,
    SoloGroup,
    VolumeBusy,
    VolumeFull,
    VolumeUnavailable,
    begin,
    open_named,
)
from lilo_volume.testing import VOLUME_CONTRACT
from lilo_volume.testing.emulator import SWEPT, EmulatedFault, Emulator, Modes, every, pairwise


def put(container, path, data):
    place = container.root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


@pytest.mark.parametrize("shared", [False, True], ids=["in process", "shared"])
@pytest.mark.parametrize("check", VOLUME_CONTRACT, ids=lambda check: check.__name__)
def test_an_emulated_volume_keeps_the_contract_of_a_volume(check, shared, tmp_path):
    emulator = Emulator(tmp_path, shared=shared)
    check(emulator.volume(emulator.mount()))


@pytest.mark.parametrize("modes", pairwise(SWEPT), ids=lambda m: " ".join(map(str, m.values())))
def test_a_checkpoint_of_one_rank_is_published_in_every_mode(modes, tmp_path):
    emulator = Emulator(tmp_path, modes=Modes(**modes))
    volume = emulator.volume(emulator.mount())
    attempt = begin(volume, SoloGroup(), collection="c", kind="k", name="n", order=1)
    with attempt.create("deep/shard") as file:
        file.write(b"bytes")
    published = attempt.publish(expected=["deep/shard"])
    # Read back by its writer, without a reload.
    assert (published.folder / "deep/shard").read_bytes() == b"bytes"
    quiet = Emulator(tmp_path / "other")
    for entry in emulator.server.list():
        quiet.server.put(entry.path, emulator.server.read(entry.path))
    reader = quiet.volume(quiet.mount())
    assert open_named(reader, "c", "k", "n", verify="full").manifest == published.manifest


def test_pairwise_modes_are_few_and_every_two_values_meet():
    rows = pairwise(SWEPT)
    assert len(rows) <= 16
    assert len(list(every(SWEPT))) == 2**5 * 3 * 4
    for first in SWEPT:
        for second in SWEPT:
            if first != second:
                met = {(row[first], row[second]) for row in rows}
                assert len(met) == len(SWEPT[first]) * len(SWEPT[second])


def test_while_a_view_reloads_its_container_sees_nothing_and_others_everything(tmp_path):
    emulator = Emulator(tmp_path, modes=Modes(reload_window_s=0.3))
    emulator.server.put("x", b"1")
    a, b = emulator.mount("a"), emulator.mount("b")
    thread = threading.Thread(target=a.reload)
    thread.start()
    seen = set()
    while thread.is_alive():
        seen.add(((a.root / "x").exists(), (b.root / "x").exists()))
    thread.join()
    assert (False, True) in seen
    assert {there for _, there in seen} == {True}
    assert (a.root / "x").read_bytes() == b"1"


def test_a_file_open_in_another_process_or_a_working_directory_inside_holds_off_a_reload(tmp_path):
    emulator = Emulator(tmp_path, shared=True)
    emulator.server.put("deep/x", b"1")
    container = emulator.mount("a")
    for code in ("f = open('deep/x')", "import os; os.chdir('deep')"):
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import os; os.chdir({str(container.root)!r})\n{code}\n"
                "import os; 'f' in dir() and os.chdir('/')\nprint('ready', flush=True); input()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with holder:
            assert holder.stdout.readline() == b"ready\n"
            with pytest.raises(VolumeBusy) as caught:
                container.reload()
            assert str(holder.pid) in str(caught.value)
            holder.communicate(b"\n", timeout=10)
        container.reload()


def test_a_child_process_acts_for_its_container(tmp_path):
    emulator = Emulator(tmp_path, shared=True)
    a, b = emulator.mount("a"), emulator.mount("b")
    put(a, "x", b"1")
    put(b, "y", b"2")
    code = (
        "import sys; from pathlib import Path; from lilo_volume.testing.emulator import Emulator\n"
        "Emulator(Path(sys.argv[1]), shared=True).attach(sys.argv[2]).commit()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), a.task_id], check=True, timeout=30)
    assert [entry.path for entry in emulator.server.list()] == ["x"]


def test_who_mounts_nothing_cannot_commit(tmp_path):
    emulator = Emulator(tmp_path)
    container = emulator.mount()
    container.crash()
    for call in (container.commit, container.reload):
        with pytest.raises(VolumeUnavailable):
            call()
    with pytest.raises(VolumeUnavailable):
        emulator.attach("nobody")


@pytest.mark.parametrize("call", ["list", "read", "copy", "remove"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_any_call_can_fail_before_or_after_it_was_applied(call, when, tmp_path):
    emulator = Emulator(tmp_path)
    container = emulator.mount()
    volume = emulator.volume(container)
    put(container, "x", b"1")
    put(container, "to/keep", b"")
    volume.commit()
    calls = {
        "list": lambda: volume.list_committed(""),
        "read": lambda: volume.read_committed("x"),
        "copy": lambda: volume.copy_committed(["x"], "to"),
        "remove": lambda: volume.remove_committed("x"),
    }
    container.fail_next(call, when)
    before = emulator.server.list()
    with pytest.raises(EmulatedFault):
        calls[call]()
    changed = emulator.server.list() != before
    assert changed == (when == "after" and call in ("copy", "remove"))


def test_a_copy_can_stop_half_way(tmp_path):
    emulator = Emulator(tmp_path)
    container = emulator.mount()
    for path in ("p/a", "p/b", "to/keep"):
        emulator.server.put(path, b"1")
    container.fail_next("copy", "mid", num_paths=1)
    with pytest.raises(EmulatedFault):
        emulator.volume(container).copy_committed(["p/a", "p/b"], "to")
    assert emulator.server.children("to") == ["a", "keep"]


def test_a_full_volume_refuses_the_commit_and_changes_nothing(tmp_path):
    limits = {"quota_bytes": 5, "max_files": 1, "max_folder_entries": 1, "max_file_bytes": 2}
    for name, value in limits.items():
        emulator = Emulator(tmp_path / name, modes=Modes(**{name: value}))
        container = emulator.mount()
        put(container, "a", b"123")
        put(container, "b", b"456")
        with pytest.raises(VolumeFull):
            container.commit()
        assert emulator.server.list() == []


def test_a_cold_read_of_what_was_removed_elsewhere_fails_unless_it_is_open(tmp_path):
    emulator = Emulator(tmp_path, modes=Modes(cold_reads_fail=True))
    for path in ("cold", "open", "mine"):
        emulator.server.put(path, b"1")
    a, b = emulator.mount("a"), emulator.mount("b")
    put(a, "mine", b"changed")
    with (a.root / "open").open("rb"):
        volume = emulator.volume(b)
        for path in ("cold", "open", "mine"):
            volume.remove_committed(path)
        assert sorted(os.listdir(a.root)) == ["mine", "open"]
    a.commit()
    # What was evicted is no removal of this container, and its change is.
    assert emulator.server.read("mine") == b"changed"


def test_version_1_has_no_recursive_copies_and_no_hard_links(tmp_path):
    emulator = Emulator(tmp_path, modes=Modes(version=1))
    container = emulator.mount()
    put(container, "d/x", b"1")
    container.commit()
    with pytest.raises(InvalidPath):
        emulator.server.copy(["d"], "e", recursive=True)
    os.link(container.root / "d/x", container.root / "d/y")
    with pytest.raises(InvalidPath):
        container.commit()


def test_hard_links_become_two_files(tmp_path):
    emulator = Emulator(tmp_path)
    container = emulator.mount()
    put(container, "x", b"1")
    os.link(container.root / "x", container.root / "y")
    container.commit()
    assert emulator.server.read("x") == emulator.server.read("y") == b"1"
    assert container.calls["commit"] == 1
    container.commit()
    container.reload()
    assert (container.root / "y").read_bytes() == b"1"


def test_a_link_is_a_path_of_its_own_and_can_show_before_its_target(tmp_path):
    emulator = Emulator(tmp_path, modes=Modes(commit_atomic=False))
    a = emulator.mount("a")
    put(a, "v2/file", b"1")
    os.symlink("v2", a.root / "latest")
    a.fail_next("commit", "mid", num_paths=1)
    with pytest.raises(EmulatedFault):
        a.commit()
    b = emulator.mount("b")
    assert (b.root / "latest").is_symlink()
    assert not (b.root / "latest/file").exists()
    a.commit()
    b.reload()
    assert (b.root / "latest/file").read_bytes() == b"1"


def test_a_rewrite_of_the_same_length_is_a_change_however_quick(tmp_path):
    emulator = Emulator(tmp_path)
    container = emulator.mount()
    for number in range(20):
        put(container, "x", b"%02d" % number)
        container.commit()
        assert emulator.server.read("x") == b"%02d" % number


def test_a_volume_of_the_same_name_is_another_one(tmp_path):
    emulator = Emulator(tmp_path)
    old = emulator.mount("a")
    emulator.recreate()
    put(old, "x", b"1")
    old.commit()
    assert emulator.server.list() == []
    assert not (emulator.mount("b").root / "x").exists()


def test_what_others_committed_may_take_a_while_to_show(tmp_path):
    emulator = Emulator(tmp_path)
    a, b = emulator.mount("a"), emulator.mount("b", lag_s=60.0)
    put(a, "x", b"1")
    a.commit()
    assert emulator.volume(a).read_committed("x") == b"1"
    with pytest.raises(FileMissing):
        emulator.volume(b).read_committed("x")
    assert emulator.volume(b).list_committed("") == []


def test_commits_at_random_moments_depend_on_the_seed_alone(tmp_path):
    histories = []
    for number in range(2):
        emulator = Emulator(tmp_path / str(number), modes=Modes(background="random", seed=7))
        volume = emulator.volume(emulator.mount())
        seen = []
        for step in range(20):
            put(volume.container, f"{step:02}", b"")
            seen.append(len(volume.list_committed("")))
        histories.append(seen)
    assert histories[0] == histories[1]
    assert len(set(histories[0])) > 2
