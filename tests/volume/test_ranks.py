"""Several ranks: everybody gets the same outcome, and nobody waits for ever. Ranks are threads here."""

import pytest
from lilo_volume import (
    GroupTimeout,
    MissingFiles,
    RankFailed,
    UnexpectedFiles,
    begin,
    catalogue,
    latest,
    open_named,
)
from lilo_volume.testing import run_ranks

WORLD = 4


def start(volume, group, *, name="one", timeout_s=5.0):
    return begin(
        volume, group, collection="run", kind="weights", name=name, order=1, timeout_s=timeout_s
    )


def test_files_of_all_ranks_become_one_checkpoint(volume):
    def save(group):
        attempt = start(volume, group)
        if group.rank != 2:  # a rank may have nothing to write, and says so
            with attempt.create(f"__{group.rank}_0") as file:
                file.write(b"%d" % group.rank)
        expected = ["__0_0", "__1_0", "__3_0"] if group.rank == 0 else None
        return attempt.publish(
            expected=expected, layout={"tp": 4}, metadata={"rank": str(group.rank)}
        )

    outcomes = run_ranks(WORLD, save)
    found = open_named(volume, "run", "weights", "one", verify="full")
    assert outcomes == [found] * WORLD
    assert found.manifest.world_size == WORLD
    assert [receipt.files for receipt in found.manifest.receipts] == [
        ("__0_0",),
        ("__1_0",),
        (),
        ("__3_0",),
    ]
    assert found.manifest.metadata == {"rank": "0"}


def test_a_missing_shard_is_refused_on_every_rank_with_its_name(volume):
    def save(group):
        attempt = start(volume, group)
        if group.rank != 3:
            with attempt.create(f"__{group.rank}_0") as file:
                file.write(b"x")
        return attempt.publish(expected=[f"__{rank}_0" for rank in range(WORLD)])

    outcomes = run_ranks(WORLD, save)
    assert all(isinstance(o, MissingFiles) and o.missing == ("__3_0",) for o in outcomes)
    assert catalogue(volume) == []


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_failing_rank_is_named_on_every_rank(volume, failing):
    def save(group):
        with start(volume, group) as attempt:
            if group.rank == failing:
                raise OSError("disk full")
            with attempt.create(f"__{group.rank}_0") as file:
                file.write(b"x")
            return attempt.publish()

    outcomes = run_ranks(WORLD, save)
    for rank, outcome in enumerate(outcomes):
        if rank == failing:
            assert isinstance(outcome, OSError)
        else:
            assert isinstance(outcome, RankFailed)
            assert outcome.rank == failing
    assert volume.list_committed("") == []


def test_one_file_written_by_two_ranks_is_refused(volume):
    def save(group):
        attempt = start(volume, group)
        name = "Same" if group.rank == 1 else f"{group.rank}"
        with attempt.create("same" if group.rank == 0 else name) as file:
            file.write(b"x")
        return attempt.publish()

    assert all(isinstance(outcome, UnexpectedFiles) for outcome in run_ranks(WORLD, save))


def test_a_dead_rank_is_a_deadline_not_a_hang(volume):
    def save(group):
        attempt = start(volume, group, timeout_s=2.0)  # for all to begin, on a busy machine too
        if group.rank == 1:
            return None
        with attempt.create(f"__{group.rank}_0") as file:
            file.write(b"x")
        return attempt.publish()

    outcomes = run_ranks(WORLD, save)
    assert outcomes[1] is None
    assert all(isinstance(outcomes[rank], GroupTimeout) for rank in (0, 2, 3))
    assert catalogue(volume) == []


def test_what_to_resume_is_decided_once_for_all_ranks(volume, publish):
    publish("good", {"a": b"1"}, order=1, collection="run")
    bad = publish("bad", {"a": b"1"}, order=2, collection="run")
    (bad.folder / "a").write_bytes(b"22")
    outcomes = run_ranks(
        WORLD,
        lambda group: latest(volume, "run", "weights", verify="full", group=group, timeout_s=5.0),
    )
    assert len(set(map(str, outcomes))) == 1
    assert outcomes[0].checkpoint.publication.name == "good"
    assert [skip.label for skip in outcomes[0].skipped] == ["run/weights/bad"]
