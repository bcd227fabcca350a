"""The bulletin: versions never change, the current one never goes back, and its writer can read it at once."""

import contextlib

import pytest
from lilo_volume import (
    Bulletin,
    CheckpointMissing,
    LocalVolume,
    Retention,
    StaleVersion,
    VolumeBusy,
    VolumeUnavailable,
    collect_garbage,
    remove,
)
from lilo_volume.testing import run_ranks


def bulletin(volume, **options):
    return Bulletin(volume, collection="run", kind="adapter", **options)


def post(board, version, data=b"weights"):
    def write(attempt):
        with attempt.create("adapter.bin") as file:
            file.write(data)
        return ["adapter.bin"]

    return board.publish(version, write, metadata={"step": str(version)})


def read(checkpoint):
    return (checkpoint.folder / "adapter.bin").read_bytes()


def test_there_is_no_current_version_before_the_first(volume):
    assert bulletin(volume).current() is None


def test_the_writer_reads_what_it_wrote_and_readers_see_the_newest(volume):
    writer, reader = bulletin(volume), bulletin(volume)
    assert read(post(writer, 1, b"one")) == b"one"
    assert read(reader.current()) == b"one"
    post(writer, 5, b"five")
    assert writer.current().publication.order == 5
    assert read(reader.current()) == b"five"
    assert read(reader.at(1)) == b"one"


def test_an_announcement_that_arrived_although_its_commit_raised_counts(volume, monkeypatch):
    writer, commit = bulletin(volume), type(volume).commit
    announce = Bulletin._announce

    def busy(self):
        commit(self)
        raise VolumeBusy("a file is open, and this commit also reloads; it was applied")

    def announcing(self, version):
        with monkeypatch.context() as patch:
            patch.setattr(type(volume), "commit", busy)
            announce(self, version)

    monkeypatch.setattr(Bulletin, "_announce", announcing)
    assert read(post(writer, 1, b"one")) == b"one"
    assert read(bulletin(volume).current()) == b"one"


@pytest.mark.parametrize("version", [5, 4, 0, -1])
def test_a_version_that_is_not_newer_is_refused_and_nothing_is_written(volume, version):
    post(bulletin(volume), 5)
    before = volume.list_committed("")
    with pytest.raises(StaleVersion):
        post(bulletin(volume), version, b"late")
    assert volume.list_committed("") == before


def test_the_current_version_is_gone_rather_than_an_older_one(volume):
    post(bulletin(volume), 1)
    last = post(bulletin(volume), 2)
    remove(volume, last)
    with pytest.raises(CheckpointMissing):
        bulletin(volume).current()
    with pytest.raises(StaleVersion):
        post(bulletin(volume), 2)
    post(bulletin(volume), 3)
    assert bulletin(volume).current().publication.order == 3


def test_a_broken_newest_is_said_and_not_passed_over(volume):
    post(bulletin(volume), 1)
    last = post(bulletin(volume), 2)
    (last.folder / "adapter.bin").write_bytes(b"")
    with pytest.raises(CheckpointMissing):
        bulletin(volume).current()


def test_a_writer_that_died_before_announcing_is_made_up_for_by_the_next(volume, monkeypatch):
    class Crash(BaseException):
        pass

    def crash(self, version):
        raise Crash

    reader = bulletin(volume)
    post(bulletin(volume), 1)
    assert reader.current().publication.order == 1
    with monkeypatch.context() as patch, contextlib.suppress(Crash):
        patch.setattr(Bulletin, "_announce", crash)
        post(bulletin(volume), 2)
    assert bulletin(volume).current().publication.order == 2
    assert reader.current().publication.order == 1  # the old one or the new one
    with pytest.raises(StaleVersion):
        post(bulletin(volume), 2)
    assert reader.current().publication.order == 2


def test_looking_again_reads_announcements_only(volume):
    class Counting(LocalVolume):
        reloads = 0

        def reload(self):
            self.reloads += 1

    post(bulletin(volume), 1)
    view = Counting(volume.root)
    reader = bulletin(view)
    for _ in range(5):
        reader.current()
    assert view.reloads == 1


def test_announcements_and_old_versions_do_not_pile_up(volume):
    board = bulletin(volume)
    for version in range(10):
        post(board, version)
        collect_garbage(volume, Retention(keep_last=2, reader_guard_s=0))
    assert len(volume.list_committed("")) == 2 * 3 + 1


def test_a_writer_that_cannot_read_its_version_back_says_so(volume, tmp_path):
    class Forgetful(LocalVolume):
        def commit(self):
            for place in self.root.rglob("adapter.bin"):
                if (place.parent / "manifest.json").exists():
                    place.unlink()

    with pytest.raises(VolumeUnavailable):
        post(bulletin(Forgetful(tmp_path / "forgetful")), 1)


def test_several_ranks_publish_one_version_and_agree_on_it(volume):
    def run(group):
        board = bulletin(volume, group=group, timeout_s=5.0)

        def write(attempt):
            with attempt.create(f"part{group.rank}") as file:
                file.write(b"x")
            return [f"part{rank}" for rank in range(3)]

        first = board.publish(1, write)
        try:
            board.publish(1, write)
        except StaleVersion:
            return first, board.current()

    outcomes = run_ranks(3, run)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert outcomes[0][0] == outcomes[0][1]
    assert len(outcomes[0][0].manifest.files) == 3
