"""Checkpoints that are incomplete, or mixed. Each test has the number of its public report."""

import shutil

import pytest
from lilo_volume import (
    CheckpointCorrupt,
    CheckpointMissing,
    MissingFiles,
    PublishRefused,
    Retention,
    Target,
    adopt,
    catalogue,
    collect_garbage,
    latest,
    open_named,
    push,
    quarantine,
    release,
    survey,
)
from lilo_volume.faults import Fault, Faults

from tests.volume.cluster import ALL, Cluster, shard

NOW = Retention(keep_last=5, attempt_guard_s=0.0, reader_guard_s=0.0)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


STEPS = [
    "record",
    "commit record",
    "create *",
    "report",
    "commit",
    "check",
    "manifest",
    "commit manifest",
]


@pytest.mark.parametrize("step", STEPS)
def test_a5_a_crash_of_all_while_saving_leaves_the_one_before_and_says_why(tmp_path, step):
    cluster = Cluster(tmp_path, background="adversarial")
    cluster.saved("10")
    cluster.run(
        lambda group: cluster.save(group, "20", on_step=Faults(Fault(step=step, action="stop")))
    )
    for container in cluster.containers.values():
        container.exit()
    found = cluster.latest()
    if step != "commit manifest":  # by then a commit in the background may have published it
        assert found.checkpoint.publication.name == "10"
        assert all("never published" in skip.why for skip in found.skipped)
        assert len(found.skipped) == (step != "record" or len(found.skipped))


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "flipped"])
def test_a6_the_newest_is_damaged_so_the_older_is_taken_and_by_name_it_is_an_error(cluster, damage):
    cluster.saved("10")
    bad = cluster.saved("20")
    path = f"run/weights/20/{bad.publication.attempt}/{shard(3)}"
    if damage == "missing":
        cluster.server.remove(path)
    else:
        cluster.server.put(path, {"truncated": b"3 2", "empty": b"", "flipped": b"3 21"}[damage])
    found = cluster.latest()
    assert found.checkpoint.publication.name == "10"
    (skipped,) = found.skipped
    assert shard(3) in skipped.why
    reasons = {"missing": "is missing", "truncated": "has 3 bytes", "empty": "has 0 bytes"}
    assert reasons.get(damage, "manifest says") in skipped.why
    with pytest.raises(CheckpointCorrupt):
        cluster.open("20")


def test_a7_a_component_that_died_makes_the_whole_incomplete(cluster):
    # Two components of one checkpoint, with writers of their own: the model's ranks, and the data loader on rank 3.
    expected = [shard(0), shard(1), shard(2), "loader.json"]

    def save(group):
        with cluster.start(group) as attempt:
            if group.rank == 3:
                raise OSError("the loader died")
            with attempt.create(shard(group.rank)) as file:
                file.write(b"model")
            return attempt.publish(expected=expected)

    outcomes = cluster.run(save)
    assert all(isinstance(outcome, PublishRefused) for outcome in outcomes[:3])
    assert cluster.newest() is None

    def silently(group):
        with cluster.start(group) as attempt:
            if group.rank < 3:
                with attempt.create(shard(group.rank)) as file:
                    file.write(b"model")
            return attempt.publish(expected=expected)

    outcomes = cluster.run(silently)
    assert all(isinstance(o, MissingFiles) and o.missing == ("loader.json",) for o in outcomes)


def test_a22_files_of_an_earlier_attempt_are_never_mixed_in(cluster):
    def save(group, extra, faults=None):
        with cluster.start(group, on_step=faults) as attempt:
            for name in [shard(group.rank), *([extra] if group.rank == 0 else [])]:
                with attempt.create(name) as file:
                    file.write(extra.encode())
            return attempt.publish()

    cluster.run(lambda group: save(group, "x_a", Faults(Fault(step="check", action="stop"))))
    cluster.run(lambda group: save(group, "x_b"))
    found = cluster.open("20")
    assert [entry.path for entry in found.manifest.files] == [*ALL, "x_b"]
    assert (found.folder / shard(2)).read_bytes() == b"x_b"
    assert any(path.endswith("/x_a") for path in cluster.committed())
    collect_garbage(cluster.reader(), NOW)
    assert not any(path.endswith("/x_a") for path in cluster.committed())


def test_a23_foreign_folders_are_listed_and_never_collected_and_can_be_adopted(cluster, tmp_path):
    published = cluster.saved("10")
    folder = f"run/weights/10/{published.publication.attempt}"
    cluster.server.put("by/hand/or/other/model.bin", b"precious")
    for entry in cluster.server.list(folder):
        name = entry.path.removeprefix(f"{folder}/")
        if name != "attempt.json":
            cluster.server.put(f"copy/of/a/step/{name}", cluster.server.read(entry.path))
    collect_garbage(cluster.reader(), NOW)
    before = {path for path in cluster.committed() if path.startswith(("by/", "copy/"))}
    assert len(before) == 1 + len(ALL) + 1
    states = {item.folder: item.state for item in survey(cluster.reader()).leftovers}
    assert states["by/hand/or/other"] == "foreign"
    assert states["copy/of/a/step"] == "broken"  # its manifest belongs elsewhere

    volume = cluster.reader()
    adopt(
        volume, "by/hand/or/other", Target(collection="run", kind="weights", name="hand", order=30)
    )
    assert cluster.newest() == "hand"
    shutil.copytree(cluster.open("10").folder, tmp_path / "plain")
    push(volume, tmp_path / "plain", Target(name="again", order=40))
    assert cluster.newest() == "again"
    (tmp_path / "plain" / shard(0)).write_bytes(b"changed")
    with pytest.raises(CheckpointCorrupt):
        push(volume, tmp_path / "plain", Target(name="bad", order=50))


@pytest.mark.parametrize("hint", [False, True])
def test_a24_three_of_four_parts_are_no_checkpoint_whatever_a_pointer_says(cluster, hint):
    cluster.saved("10")
    bad = cluster.saved("20")
    cluster.server.remove(f"run/weights/20/{bad.publication.attempt}/{shard(1)}")
    if hint:
        cluster.server.put("run/weights/LATEST", b"20")
    found = cluster.latest()
    assert found.checkpoint.publication.name == "10"
    assert [skip.label for skip in found.skipped] == ["run/weights/20"]


def test_a20_a_shard_of_the_right_size_with_wrong_bytes_is_found_and_named(cluster):
    cluster.saved("10")
    bad = cluster.saved("20")
    cluster.server.put(f"run/weights/20/{bad.publication.attempt}/{shard(1)}", b"1 2x")
    # A reader that only counts bytes does not see it.
    counted = latest(cluster.reader(), "run", "weights", verify="size").checkpoint
    assert counted.manifest == bad.manifest
    found = cluster.latest()
    assert found.checkpoint.publication.name == "10"
    assert shard(1) in found.skipped[0].why
    # It is kept for a look, and never chosen.
    collect_garbage(cluster.reader(), NOW)
    assert any(path.startswith("run/weights/20/") for path in cluster.committed())
    with pytest.raises(CheckpointCorrupt):
        open_named(cluster.reader(), "run", "weights", "20", verify="full")


def test_a20_a_bad_checkpoint_is_quarantined_so_it_is_kept_and_never_loaded_until_it_is_released(
    cluster,
):
    cluster.saved("10")
    cluster.saved("20")
    volume = cluster.reader()
    assert quarantine(volume, "run", "weights", "20", note="NaN three steps after every load")
    assert not quarantine(volume, "run", "weights", "20")
    for level in ("names", "size", "full"):
        found = latest(cluster.reader(), "run", "weights", verify=level)
        assert found.checkpoint.publication.name == "10"
        assert "quarantined" in found.skipped[0].why
        with pytest.raises(CheckpointCorrupt):
            open_named(cluster.reader(), "run", "weights", "20", verify=level)
    # No policy removes it, and what stands in for it counts as the newest.
    unkind = Retention(keep_last=1, reader_guard_s=0, attempt_guard_s=0, remove_broken=True)
    collect_garbage(volume, unkind)
    assert {item.publication.name for item in catalogue(cluster.reader())} == {"10", "20"}
    assert release(volume, "run", "weights", "20")
    assert not release(volume, "run", "weights", "20")
    assert cluster.latest().checkpoint.publication.name == "20"


def test_a20_what_overwrites_a_quarantined_checkpoint_can_be_loaded(volume, publish):
    publish("20", {"a": b"bad"})
    quarantine(volume, "run:train:0", "weights", "20")
    publish("20", {"a": b"good"}, overwrite=True)
    good = open_named(volume, "run:train:0", "weights", "20", verify="full")
    assert (good.folder / "a").read_bytes() == b"good"
    assert survey(volume).leftovers == ()


def test_a24_no_checkpoint_at_all_is_said_with_what_there_is(cluster):
    cluster.run(
        lambda group: cluster.save(group, on_step=Faults(Fault(step="check", action="stop")))
    )
    with pytest.raises(CheckpointMissing):
        cluster.open("20")
