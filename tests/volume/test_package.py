"""The package: what it exports, what importing it costs, its errors, its command."""

import json
import pickle
import subprocess
import sys

import lilo_volume
import pytest
from lilo_volume import errors
from lilo_volume.cli import GOOD, USAGE, WRONG, main

PROBE = """
import sys
before = set(sys.modules)
import lilo_volume
third = {"torch", "modal", "fsspec", "xxhash", "numpy", "pydantic"} & sys.modules.keys()
assert not third, third
slow = {"asyncio", "shutil", "subprocess", "multiprocessing", "urllib.request", "http.client"} & (
    sys.modules.keys() - before
)
assert not slow, slow
"""


def test_everything_exported_is_there_and_everything_public_is_exported():
    assert sorted(lilo_volume.__all__) == lilo_volume.__all__
    for name in lilo_volume.__all__:
        assert getattr(lilo_volume, name) is not None
    kinds = {
        v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__
    }
    assert {kind.__name__ for kind in kinds} <= set(lilo_volume.__all__)


def test_importing_loads_nothing_from_third_parties_and_nothing_slow_of_the_standard_library():
    subprocess.run([sys.executable, "-c", PROBE], check=True, timeout=30)


@pytest.mark.parametrize(
    "error",
    [
        errors.MissingFiles("c", ("a", "b"), 3),
        errors.UnexpectedFiles("c", ("a",), "nobody expected"),
        errors.RankFailed("c", 2, "node", "disk full"),
        errors.NameTaken("taken"),
        errors.CheckpointMissing("none"),
        errors.GroupTimeout("late"),
    ],
)
def test_errors_cross_processes_whole(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def test_kinds_are_stable_and_unique():
    kinds = [
        v.kind
        for v in vars(errors).values()
        if isinstance(v, type) and issubclass(v, errors.VolumeError)
    ]
    assert len(set(kinds)) == len(kinds) > 10


def test_ls_lists_checkpoints_and_leftovers(volume, publish, capsys):
    publish("one", {"a": b"1"})
    assert main(["ls", str(volume.root), "--json"]) == GOOD
    (checkpoint,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert checkpoint["name"] == "one"
    assert checkpoint["metadata"] == {"name": "one"}
    assert main(["ls", str(volume.root)]) == GOOD
    assert "run:train:0/weights/one" in capsys.readouterr().out


def test_latest_names_the_newest_and_is_wrong_when_there_is_none(volume, publish, capsys):
    assert main(["latest", str(volume.root), "--json"]) == WRONG
    publish("one", {"a": b"1"}, order=1)
    publish("two", {"a": b"1"}, order=2)
    capsys.readouterr()
    assert main(["latest", str(volume.root), "--json"]) == GOOD
    (found,) = json.loads(capsys.readouterr().out)["latest"]
    assert found["name"] == "two"
    assert main(["latest", str(volume.root), "--collection", "nobody"]) == WRONG
    broken = publish("only", {"a": b"1"}, collection="broken")
    (broken.folder / "manifest.json").write_bytes(b"{}")
    capsys.readouterr()
    assert main(["latest", str(volume.root), "--json"]) == WRONG
    assert [s["label"] for s in json.loads(capsys.readouterr().out)["skipped"]] == [
        "broken/weights/only"
    ]


def test_verify_tells_good_from_wrong(volume, publish, capsys):
    publish("one", {"a": b"1"})
    broken = publish("two", {"a": b"1"})
    assert main(["verify", str(volume.root)]) == GOOD
    (broken.folder / "a").write_bytes(b"2")
    assert main(["verify", str(volume.root), "--level", "size"]) == GOOD
    capsys.readouterr()
    assert main(["verify", str(volume.root), "--json"]) == WRONG
    faults = {c["label"]: c["fault"] for c in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert faults["run:train:0/weights/one"] is None
    assert faults["run:train:0/weights/two"]


@pytest.mark.parametrize("arguments", [["ls"], ["polish", "."], ["verify", ".", "--level", "some"]])
def test_bad_usage_exits_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == USAGE


def test_a_root_that_is_not_there_is_bad_usage(tmp_path, capsys):
    assert main(["ls", str(tmp_path / "nothing")]) == USAGE
    assert main(["ls", str(tmp_path), "--kind", "weights"]) == USAGE
