"""Crashes and faults: stop after any step, or let the medium fail; readers get the old or the new, never a mix."""

import contextlib
from collections.abc import Callable

import pytest
from lilo_volume import (
    FileMissing,
    LocalVolume,
    OutcomeUnknown,
    PublishRefused,
    SoloGroup,
    VolumeBusy,
    VolumeUnavailable,
    begin,
    catalogue,
    latest,
    open_named,
)

OLD, NEW = b"old", b"new"


class Crash(BaseException):
    """The process ends here: nothing after it runs, no clean-up either."""


def save(
    volume, data, *, on_step: Callable[[str], None] | None = None, name="one", order=1
) -> None:
    attempt = begin(
        volume,
        SoloGroup(),
        collection="run",
        kind="weights",
        name=name,
        order=order,
        overwrite=True,
        on_step=on_step,
    )
    for file_name in ("a", "b"):
        with attempt.create(file_name) as file:
            file.write(data * 3)
    attempt.publish(expected=["a", "b"])


def content(checkpoint) -> set[bytes]:
    return {(checkpoint.folder / entry.path).read_bytes() for entry in checkpoint.manifest.files}


def steps_of_a_save(tmp_path) -> list[str]:
    volume = LocalVolume(tmp_path / "dry")
    save(volume, OLD)
    steps: list[str] = []
    save(volume, NEW, on_step=steps.append)
    return steps


def test_every_step_of_a_save_has_a_name(tmp_path):
    assert steps_of_a_save(tmp_path) == [
        "begin",
        "record",
        "commit record",
        "create a",
        "create b",
        "flush",
        "report",
        "commit",
        "check",
        "look",
        "manifest",
        "commit manifest",
        "replace",
        "announce",
    ]


@pytest.mark.parametrize("same_name", [True, False])
def test_a_crash_before_any_step_leaves_the_old_or_the_new(tmp_path, same_name):
    steps = steps_of_a_save(tmp_path)
    seen = []
    for number, step in enumerate(steps):
        volume = LocalVolume(tmp_path / str(number))
        save(volume, OLD, name="one", order=1)

        def crash(name: str, step: str = step) -> None:
            if name == step:
                raise Crash

        with contextlib.suppress(Crash):  # `replace` does not come when nothing is replaced
            save(volume, NEW, name="one" if same_name else "two", order=2, on_step=crash)
        found = latest(volume, "run", "weights", verify="full").checkpoint
        assert found is not None, step
        assert content(found) in ({OLD * 3}, {NEW * 3}), step
        seen.append(content(found) == {NEW * 3})
        if same_name:
            assert open_named(volume, "run", "weights", "one", verify="full") == found
        # A retry ends well, whatever the crash left.
        save(volume, NEW, name="one" if same_name else "two", order=2)
        final = latest(volume, "run", "weights", verify="full").checkpoint
        assert final is not None
        assert content(final) == {NEW * 3}
        assert len(catalogue(volume)) == (1 if same_name else 2)
    assert seen == sorted(seen)  # once visible, it stays visible
    assert seen[steps.index("manifest")] is False
    assert seen[steps.index("commit manifest")] is True


class FaultyVolume(LocalVolume):
    """A directory whose commits act like a remote volume's on a bad day; `script` says what each one does."""

    def __init__(self, root, script: list[str]) -> None:
        super().__init__(root)
        self.script = script
        self.blind = False

    def commit(self) -> None:
        fault = self.script.pop(0) if self.script else "fine"
        if fault == "busy":
            raise VolumeBusy("there are open files")
        if fault != "fine":
            # Not applied: what was written last is not in the committed state.
            self.hidden = fault == "lost"
            raise VolumeUnavailable("no answer")
        self.hidden = False

    hidden = False

    def read_committed(self, path: str) -> bytes:
        if self.blind:
            raise VolumeUnavailable("no answer")
        if self.hidden:
            raise FileMissing(path)
        return super().read_committed(path)


def test_a_commit_that_raised_after_it_was_applied_is_a_success(tmp_path):
    volume = FaultyVolume(tmp_path, ["fine", "fine", "busy"])
    save(volume, NEW)
    assert content(open_named(volume, "run", "weights", "one", verify="full")) == {NEW * 3}


def test_a_lost_commit_is_tried_again(tmp_path):
    volume = FaultyVolume(tmp_path, ["unavailable", "fine", "unavailable", "fine", "lost", "fine"])
    save(volume, NEW)
    assert content(open_named(volume, "run", "weights", "one", verify="full")) == {NEW * 3}


def test_a_volume_that_never_takes_the_manifest_refuses_and_publishes_nothing(tmp_path):
    volume = FaultyVolume(tmp_path, ["fine", "fine", "lost", "lost", "lost"])
    with pytest.raises(PublishRefused):
        save(volume, NEW)
    volume.hidden = False
    assert catalogue(volume) == []


def test_a_volume_that_will_not_say_gives_an_unknown_outcome_and_nothing_is_removed(tmp_path):
    volume = FaultyVolume(tmp_path, ["fine"])
    save(volume, OLD)
    volume.script = ["fine", "fine", "unavailable"]

    def blind(step: str) -> None:
        volume.blind = step == "commit manifest"

    with pytest.raises(OutcomeUnknown):
        save(volume, NEW, on_step=blind)
    volume.blind = False
    assert content(open_named(volume, "run", "weights", "one", verify="full")) == {NEW * 3}


def test_a_clock_that_goes_back_does_not_bring_the_old_back(volume, monkeypatch):
    save(volume, OLD)
    monkeypatch.setattr("lilo_volume.publish.time.time_ns", lambda: 0)

    def crash(step: str) -> None:
        if step == "replace":
            raise Crash

    with pytest.raises(Crash):
        save(volume, NEW, on_step=crash)
    assert content(open_named(volume, "run", "weights", "one", verify="full")) == {NEW * 3}
