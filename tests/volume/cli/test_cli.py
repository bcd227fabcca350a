"""The command: golden outputs, one JSON object each, exit codes, and that looking and keeping create nothing."""

import json
import os
import subprocess
import sys
import uuid

import pytest
from lilo_volume import LocalVolume, catalogue, open_named
from lilo_volume.cli import GOOD, USAGE, WRONG, main
from lilo_volume.cli.output import bar_text, size_text
from lilo_volume.transfer import Progress

RUN = "run:train:0"


@pytest.fixture
def ask(capsys):
    """Run a command with --json: exit code and the object."""

    def run(*arguments):
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None

    return run


def tree(root):
    """Everything below a folder: names, and bytes of files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def test_ls_shows_a_table(volume, publish, capsys, monkeypatch):
    publish("one", {"a": b"12345"}, order=7)
    (volume.root / "left/weights/two/0123456789abcdef").mkdir(parents=True)
    (volume.root / "left/weights/two/0123456789abcdef/x").write_bytes(b"1")
    assert main(["ls", str(volume.root)]) == GOOD
    lines = capsys.readouterr().out.splitlines()
    (item,) = catalogue(volume)
    assert lines[0].split() == ["CHECKPOINT", "ORDER", "PUBLISHED", "SIZE", "FILES"]
    assert lines[1].split()[:2] == [item.label, "7"]
    assert lines[1].split()[-3:] == ["5", "B", "1"]
    assert lines[2] == ""
    assert lines[3].split() == ["LEFTOVER", "STATE", "SIZE", "WHY"]
    assert lines[4].split()[:2] == ["left/weights/two", "foreign"]


@pytest.mark.parametrize("command", ["ls", "latest", "verify"])
def test_a_name_of_any_characters_is_shown_and_changes_no_terminal(
    volume, publish, capsysbinary, command
):
    names = ["plain", "half \ud800", "two\nlines", "\x1b[31mred", "\u202eright to left"]
    for order, name in enumerate(names):
        publish(name, {"a": b"1"}, order=order)
    assert main([command, str(volume.root)]) == 0
    shown = capsysbinary.readouterr().out.decode("utf-8")
    assert all(line.isprintable() for line in shown.splitlines())
    wanted = ["plain", r"half \ud800", r"two\nlines", r"\x1b[31mred", r"\u202eright"]
    assert all(name in shown for name in (wanted if command != "latest" else wanted[-1:]))


def test_pins_are_shown_and_hold_against_gc(volume, publish, ask):
    for number in range(3):
        publish(f"s{number}", {"a": b"1"}, order=number)
    assert ask("pin", volume.root, RUN, "weights", "s0", "--note", "paper")[0] == GOOD
    pinned = [item["name"] for item in ask("ls", volume.root)[1]["checkpoints"] if item["pinned"]]
    assert pinned == ["s0"]
    code, done = ask("gc", volume.root, "--keep-last", "1", "--reader-guard-s", "0")
    assert code == GOOD
    assert [item["label"] for item in done["removed"]] == [f"{RUN}/weights/s1"]
    assert ask("unpin", volume.root, RUN, "weights", "s0")[0] == GOOD
    assert ask("unpin", volume.root, RUN, "weights", "s0")[0] == WRONG
    ask("gc", volume.root, "--keep-last", "1", "--reader-guard-s", "0")
    assert [item.publication.name for item in catalogue(volume)] == ["s2"]


def test_a_quarantined_checkpoint_is_shown_and_is_not_the_latest(volume, publish, ask):
    for number in range(2):
        publish(f"s{number}", {"a": b"1"}, order=number)
    assert ask("quarantine", volume.root, RUN, "weights", "s1", "--note", "NaN")[0] == GOOD
    shown = {i["name"]: i["quarantined"] for i in ask("ls", volume.root)[1]["checkpoints"]}
    assert shown == {"s0": False, "s1": True}
    assert [item["name"] for item in ask("latest", volume.root)[1]["latest"]] == ["s0"]
    assert ask("verify", volume.root)[0] == WRONG
    assert ask("release", volume.root, RUN, "weights", "s1")[0] == GOOD
    assert ask("release", volume.root, RUN, "weights", "s1")[0] == WRONG
    assert ask("verify", volume.root)[0] == GOOD


def test_a_share_of_the_files_is_verified_and_one_bad_file_is_found_in_the_end(
    volume, publish, ask
):
    checkpoint = publish("one", dict.fromkeys("abcd", b"1"))
    (checkpoint.folder / "c").write_bytes(b"2")
    codes = [ask("verify", volume.root, "--share", "0.25")[0] for _ in range(100)]
    # One of four files each time: the chance that a hundred draws all miss it, or all hit it, is below 1e-12.
    assert set(codes) == {GOOD, WRONG}
    with pytest.raises(SystemExit) as caught:
        ask("verify", volume.root, "--share", "0")
    assert caught.value.code == USAGE


def test_gc_dry_run_changes_nothing_and_tells_the_same(volume, publish, ask):
    for number in range(3):
        publish(f"s{number}", {"a": b"1"}, order=number)
    before = tree(volume.root)
    rules = ("--keep-last", "1", "--reader-guard-s", "0")
    _, planned = ask("gc", volume.root, "--dry-run", *rules)
    assert tree(volume.root) == before
    _, done = ask("gc", volume.root, *rules)
    assert [i["folder"] for i in done["removed"]] == [i["folder"] for i in planned["removed"]]
    assert len(done["removed"]) == 2
    assert done["freed_bytes"] > 0


def test_gc_without_a_rule_removes_no_checkpoint(volume, publish, ask):
    publish("one", {"a": b"1"})
    code, done = ask("gc", volume.root, "--reader-guard-s", "0", "--attempt-guard-s", "0")
    assert (code, done["removed"]) == (GOOD, [])
    assert main(["gc", str(volume.root), "--keep-last", "0"]) == USAGE
    assert main(["gc", str(volume.root), "--keep-best", "1"]) == USAGE


def test_a_missing_name_cannot_be_pinned_or_pulled(volume, publish, ask, tmp_path):
    publish("one", {"a": b"1"})
    assert ask("pin", volume.root, RUN, "weights", "two")[0] == WRONG
    assert ask("pull", volume.root, RUN, "weights", "two", tmp_path / "out")[0] == WRONG
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_pulled_pushed_and_verified(volume, publish, ask, tmp_path):
    publish("one", {"a": b"1" * 100, "deep/b": b"2" * 3_000_000}, order=5)
    out = tmp_path / "out"
    code, pulled = ask("pull", volume.root, RUN, "weights", "one", out)
    assert (code, pulled["folder"]) == (GOOD, str(out))
    assert (out / "deep/b").read_bytes() == b"2" * 3_000_000
    other = LocalVolume(tmp_path / "other")
    code, pushed = ask("push", other.root, out)
    assert (code, pushed["name"], pushed["order"]) == (GOOD, "one", 5)
    found = open_named(other, RUN, "weights", "one", verify="full")
    assert found.manifest.metadata == {"name": "one"}
    # It is one checkpoint: again is refused, unless it is to replace it.
    assert ask("push", other.root, out)[0] == WRONG
    assert ask("push", other.root, out, "--overwrite", "--metadata", "who=me")[0] == GOOD
    assert catalogue(other)[0].manifest.metadata == {"who": "me"}


def test_a_pulled_folder_whose_bytes_changed_is_not_pushed(volume, publish, ask, tmp_path):
    publish("one", {"a": b"12345"})
    ask("pull", volume.root, RUN, "weights", "one", tmp_path / "out")
    (tmp_path / "out/a").write_bytes(b"54321")
    other = LocalVolume(tmp_path / "other")
    assert ask("push", other.root, tmp_path / "out")[0] == WRONG
    assert catalogue(other) == []


def test_a_plain_folder_needs_a_name(volume, ask, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/a").write_bytes(b"1")
    assert ask("push", volume.root, tmp_path / "plain")[0] == USAGE
    names = ("--collection", "c", "--kind", "k", "--name", "n", "--order", "1")
    assert ask("push", volume.root, tmp_path / "plain", *names)[0] == GOOD
    assert ask("push", volume.root, tmp_path / "nothing", *names)[0] == USAGE
    assert ask("push", volume.root, tmp_path / "plain", *names, "--metadata", "x")[0] == USAGE


def test_a_foreign_folder_is_adopted_and_left_alone(volume, ask):
    (volume.root / "old/step-5").mkdir(parents=True)
    (volume.root / "old/step-5/model").write_bytes(b"weights")
    names = ("--collection", "c", "--kind", "k", "--name", "step-5", "--order", "5")
    code, adopted = ask("adopt", volume.root, "old/step-5", *names)
    assert (code, adopted["num_files"]) == (GOOD, 1)
    assert open_named(volume, "c", "k", "step-5", verify="full").size_bytes == 7
    assert (volume.root / "old/step-5/model").read_bytes() == b"weights"
    assert ask("adopt", volume.root, "no/such", *names)[0] == WRONG
    assert ask("adopt", volume.root, "../outside", *names)[0] == USAGE


def test_a_copy_of_a_checkpoint_is_adopted_by_its_manifest(volume, publish, ask):
    import shutil

    found = publish("one", {"a": b"1"}, order=3)
    shutil.copytree(found.folder, volume.root / "a/b/copy/of-it")
    code, adopted = ask("adopt", volume.root, "a/b/copy/of-it", "--name", "again")
    assert (code, adopted["name"], adopted["order"]) == (GOOD, "again", 3)
    (volume.root / "a/b/copy/of-it/a").write_bytes(b"2")
    assert ask("adopt", volume.root, "a/b/copy/of-it", "--name", "third")[0] == WRONG


def test_doctor_tells_what_is_installed_and_what_is_wrong(volume, publish, ask):
    code, alone = ask("doctor")
    assert code == GOOD
    assert {"lilo-volume", "node", "digest"} <= {item["what"] for item in alone["findings"]}
    broken = publish("one", {"a": b"1"})
    assert ask("doctor", volume.root)[0] == GOOD
    (broken.folder / "a").unlink()
    code, found = ask("doctor", volume.root)
    assert code == WRONG
    assert [i["what"] for i in found["findings"] if i["state"] == "wrong"] == [
        f"latest of {RUN}/weights"
    ]


LOOKS = [
    ("ls",),
    ("latest",),
    ("verify",),
    ("doctor",),
    ("gc",),
    ("gc", "--dry-run", "--keep-last", "1"),
]


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_looking_and_keeping_create_nothing(command, volume, tmp_path, ask):
    name, *options = command
    absent = tmp_path / "absent"
    assert ask(name, absent, *options)[0] == USAGE
    assert not absent.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    ask(name, empty, *options)
    assert list(empty.iterdir()) == []
    for root in (absent, empty):
        for wanted in (("pin", root, "c", "k", "n"), ("unpin", root, "c", "k", "n")):
            assert ask(*wanted)[0] in (WRONG, USAGE)
    assert not absent.exists()
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("command", LOOKS[:4], ids=" ".join)
def test_looking_changes_no_byte_of_a_volume(command, volume, publish, ask):
    publish("one", {"a": b"1"})
    broken = publish("two", {"a": b"1"})
    (broken.folder / "a").unlink()
    before = tree(volume.root)
    ask(command[0], volume.root)
    assert tree(volume.root) == before


def test_a_url_is_a_root_too(publish, volume, ask, tmp_path):
    publish("one", {"a": b"1"})
    ask("pull", volume.root, RUN, "weights", "one", tmp_path / "out")
    url = f"memory://{uuid.uuid4().hex}"
    assert ask("push", url, tmp_path / "out")[0] == GOOD
    code, listed = ask("ls", url)
    assert (code, [item["name"] for item in listed["checkpoints"]]) == (GOOD, ["one"])
    assert ask("verify", url)[0] == GOOD
    assert ask("pull", url, RUN, "weights", "one", tmp_path / "back")[0] == GOOD
    assert (tmp_path / "back/a").read_bytes() == b"1"
    assert ask("ls", "nothing-of-the-kind://x")[0] == WRONG
    assert ask("ls", url, "--shared")[0] == USAGE


def test_the_installed_command_runs_and_prints_one_object(volume, publish):
    publish("one", {"a": b"1"})
    run = subprocess.run(
        [sys.executable, "-m", "lilo_volume.cli", "latest", str(volume.root), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert run.returncode == GOOD, run.stderr
    assert json.loads(run.stdout)["latest"][0]["name"] == "one"
    assert run.stderr == ""


def test_progress_is_a_line():
    progress = Progress(done_bytes=512, total_bytes=1024, done_files=1, total_files=2)
    assert bar_text("pull", progress, 1.0) == (
        "pull [###############...............]  50%  512 B of 1.0 KiB, 1 of 2 files, 512 B/s"
    )
    assert size_text(3 * 1024**3) == "3.0 GiB"


def test_a_benchmark_that_is_terminated_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "lilo_volume.cli", "bench", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--size", "64MiB", "--passes", "1000"], stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline().startswith("pass 0")
        run.terminate()
        run.stderr.read()  # closed once the nodes are gone, too
        assert run.wait(timeout=30) == 143
    assert list(tmp_path.iterdir()) == []


def test_bench_prints_one_object_whose_first_figure_counts(tmp_path, ask):
    code, figures = ask("bench", tmp_path, "--size", "32MiB", "--shards", "4", "--passes", "1")
    assert code == GOOD
    assert figures["publish_over_write_p50"] > 0
    assert {"xxh3_fsync", "xxh3", "sha256_fsync", "sha256", "copying_fsync"} == set(
        figures["publish_over_write"]
    )
    assert figures["size_bytes"] == 32 * 1024**2
    assert list(tmp_path.iterdir()) == []
    assert ask("bench", tmp_path, "--size", "many")[0] == USAGE
    assert ask("bench", tmp_path, "--nodes", "0")[0] == USAGE
    assert ask("bench", tmp_path / "absent")[0] == USAGE
