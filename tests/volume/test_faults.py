"""Faults: any named step can be stopped, failed, or failed after it was taken, by anybody who publishes."""

import os
import signal
import subprocess
import sys

import pytest
from lilo_volume import LocalVolume, SoloGroup, VolumeUnavailable, begin, latest
from lilo_volume.faults import Fault, Faults, InjectedFault, Stopped
from lilo_volume.steps import TRIES


def save(volume, faults):
    with begin(
        volume, SoloGroup(), collection="c", kind="k", name="n", order=1, on_step=faults
    ) as attempt:
        with attempt.create("shard") as file:
            file.write(b"1")
        return attempt.publish()


def published(volume):
    return latest(volume, "c", "k").checkpoint is not None


def test_a_stopped_rank_takes_no_step_any_more_not_even_to_clean_up(volume):
    faults = Faults(Fault(step="check", action="stop"))
    with pytest.raises(Stopped):
        save(volume, faults)
    assert faults.seen[-1] == "check"
    assert faults.struck == ["check"]
    assert not published(volume)


def test_a_step_that_fails_once_is_taken_again(volume):
    faults = Faults(Fault(step="commit", action="raise", times=1))
    save(volume, faults)
    assert faults.seen.count("commit") == 2
    assert published(volume)


def test_a_step_that_always_fails_is_tried_a_few_times(volume):
    faults = Faults(Fault(step="record", action="raise"))
    with pytest.raises(VolumeUnavailable):
        save(volume, faults)
    assert faults.struck == ["record"] * TRIES
    assert volume.list_committed("") == []


def test_a_step_that_fails_after_it_was_taken_was_taken(volume):
    faults = Faults(Fault(step="commit manifest", action="fail_after"))
    save(volume, faults)
    assert faults.struck == ["commit manifest"]  # it was found to be there, and not sent again
    assert published(volume)


def test_steps_are_named_by_patterns_and_errors_are_of_any_kind(volume):
    faults = Faults(Fault(step="create *", action="raise", error=OSError))
    with pytest.raises(OSError, match="create shard"):
        save(volume, faults)
    assert issubclass(InjectedFault, VolumeUnavailable)


def test_a_process_can_be_killed_at_a_step(tmp_path):
    code = (
        "import sys; from lilo_volume import *; from lilo_volume.faults import *\n"
        "faults = Faults(Fault(step='manifest', action='stop'), stop=kill_this_process)\n"
        "a = begin(LocalVolume(sys.argv[1]), SoloGroup(), collection='c', kind='k', name='n', order=1, "
        "on_step=faults)\n"
        "with a.create('shard') as f: f.write(b'1')\n"
        "a.publish()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=30)
    assert done.returncode == -signal.SIGKILL
    volume = LocalVolume(tmp_path)
    assert not published(volume)
    save(volume, None)
    assert published(volume)
    assert os.listdir(volume.root / "c" / "k") == ["n"]
