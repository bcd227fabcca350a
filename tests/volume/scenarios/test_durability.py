"""Media that are not what they seem. Each test has the number of its public report."""

import os

import pytest
from lilo_volume import LocalVolume, MissingFiles, SoloGroup, begin, latest, open_named


class Lossy(LocalVolume):
    """A mount of a bucket: what a commit has sent may be short of what was written."""

    def __init__(self, root, keep_bytes):
        super().__init__(root)
        self.keep_bytes = keep_bytes

    def commit(self):
        for place in self.root.rglob("shard-*"):
            os.truncate(place, self.keep_bytes)


def save(volume, name="20"):
    with begin(
        volume, SoloGroup(), collection="run", kind="weights", name=name, order=int(name)
    ) as attempt:
        for number in range(2):
            with attempt.create(f"shard-{number}") as file:
                file.write(b"0123456789")
        return attempt.publish()


@pytest.mark.parametrize("keep_bytes", [0, 9])
def test_a26_a_file_that_is_empty_or_short_once_it_is_committed_is_refused(tmp_path, keep_bytes):
    volume = Lossy(tmp_path, keep_bytes)
    with pytest.raises(MissingFiles) as caught:
        save(volume)
    assert caught.value.missing == ("shard-0", "shard-1")
    assert latest(volume, "run", "weights").checkpoint is None


def test_a26_no_folder_is_ever_renamed(tmp_path, monkeypatch):
    def files_only(call):
        def renamed(source, target, **kwargs):
            assert not os.path.isdir(source), f"a folder was renamed: {source}"
            return call(source, target, **kwargs)

        return renamed

    for name in ("rename", "replace", "renames"):
        monkeypatch.setattr(os, name, files_only(getattr(os, name)))
    volume = LocalVolume(tmp_path)
    assert save(volume) == open_named(volume, "run", "weights", "20", verify="full")
