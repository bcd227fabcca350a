"""Saves in the background: in order, never piling up, and never failing without a word."""

import subprocess
import sys
import threading

import pytest
from lilo_volume import (
    AsyncPublisher,
    GroupTimeout,
    NotFinished,
    PublishRefused,
    SoloGroup,
    begin,
    latest,
)
from lilo_volume.testing import run_ranks, thread_groups

SOON_S = 5.0


def save(volume, step, data=b"x"):
    with begin(
        volume, SoloGroup(), collection="run", kind="weights", name=str(step), order=step
    ) as attempt:
        with attempt.create("shard") as file:
            file.write(data)
        return attempt.publish()


def fail(text="disk full"):
    raise OSError(text)


def test_a_save_goes_on_behind_and_its_handle_has_the_checkpoint(volume):
    go = threading.Event()

    def slow():
        assert go.wait(SOON_S)
        return save(volume, 1)

    with AsyncPublisher() as publisher:
        pending = publisher.submit(slow, label="step 1")
        assert not pending.ended
        assert latest(volume, "run", "weights").checkpoint is None
        go.set()
        assert pending.result(SOON_S) == latest(volume, "run", "weights").checkpoint


def test_saves_end_in_the_order_in_which_they_were_handed_in(volume):
    order = []
    with AsyncPublisher(max_in_flight=8) as publisher:
        for step in range(8):
            publisher.submit(lambda step=step: order.append(step), label=str(step))
    assert order == list(range(8))


def test_a_submit_waits_for_the_save_so_many_before_it(volume):
    go = threading.Event()
    publisher = AsyncPublisher(max_in_flight=2)
    publisher.submit(lambda: go.wait(SOON_S), label="0")
    publisher.submit(lambda: None, label="1")
    with pytest.raises(NotFinished):
        publisher.submit(lambda: None, label="2", timeout_s=0.05)
    go.set()
    publisher.submit(lambda: None, label="2", timeout_s=SOON_S)
    publisher.close(SOON_S)


def test_an_error_is_raised_at_the_next_save_which_is_then_not_handed_in():
    done = []
    publisher = AsyncPublisher()
    publisher.submit(fail, label="0")
    with pytest.raises(OSError, match="disk full"):
        publisher.submit(lambda: done.append(1), label="1", timeout_s=SOON_S)
    publisher.submit(lambda: done.append(2), label="2", timeout_s=SOON_S)
    publisher.close(SOON_S)
    assert done == [2]


def test_an_error_is_raised_at_close_with_those_that_followed():
    publisher = AsyncPublisher(max_in_flight=4)
    publisher.submit(lambda: fail("first"), label="0")
    publisher.submit(lambda: None, label="1")
    publisher.submit(lambda: fail("second"), label="2")
    with pytest.raises(OSError, match="first") as caught:
        publisher.close(SOON_S)
    assert any("second" in note for note in caught.value.__notes__)
    publisher.close(SOON_S)


def test_an_error_that_was_heard_is_not_raised_again():
    with AsyncPublisher() as publisher:
        pending = publisher.submit(fail, label="0")
        with pytest.raises(OSError, match="disk full"):
            pending.result(SOON_S)
        publisher.submit(lambda: None, label="1")


def test_leaving_through_an_error_keeps_that_error_and_notes_the_other():
    def train():
        with AsyncPublisher() as publisher:
            publisher.submit(fail, label="0")
            raise ValueError("training failed")

    with pytest.raises(ValueError, match="training") as caught:
        train()
    assert any("disk full" in note for note in caught.value.__notes__)


def test_a_save_that_tries_to_leave_the_thread_is_an_error_and_the_thread_goes_on():
    publisher = AsyncPublisher()
    publisher.submit(sys.exit, label="0")
    with pytest.raises(SystemExit):
        publisher.submit(lambda: None, label="1", timeout_s=SOON_S)
    assert publisher.submit(lambda: 5, label="2", timeout_s=SOON_S).result(SOON_S) == 5
    publisher.close(SOON_S)


def test_which_submit_raises_is_the_same_on_every_rank(volume):
    """Rank 1 hears of the failure at once, rank 0 late: both must take the same path through later saves."""
    groups = thread_groups(2)

    def train(place):
        group, outcomes = groups[place.rank], []

        def step(number):
            with begin(
                volume,
                group,
                collection="run",
                kind="weights",
                name=str(number),
                order=number,
                timeout_s=SOON_S,
            ) as attempt:
                if number == 1 and group.rank == 1:
                    raise OSError("disk full")
                with attempt.create(f"shard{group.rank}") as file:
                    file.write(b"x")
                return attempt.publish()

        publisher = AsyncPublisher()
        for number in range(4):
            try:
                publisher.submit(lambda n=number: step(n), label=str(number), timeout_s=SOON_S)
                outcomes.append("handed in")
            except (OSError, PublishRefused):
                outcomes.append("heard")
        publisher.close(SOON_S)
        return outcomes

    assert run_ranks(2, train) == [["handed in", "handed in", "heard", "handed in"]] * 2
    found = latest(volume, "run", "weights").checkpoint
    assert found is not None
    assert found.publication.order == 3


def test_until_it_is_published_the_old_one_is_the_latest(volume):
    save(volume, 1)
    reached, go = threading.Event(), threading.Event()

    def slow():
        def stop(step):
            if step == "manifest":
                reached.set()
                assert go.wait(SOON_S)

        attempt = begin(
            volume,
            SoloGroup(),
            collection="run",
            kind="weights",
            name="2",
            order=2,
            on_step=stop,
        )
        with attempt.create("shard") as file:
            file.write(b"x")
        return attempt.publish()

    with AsyncPublisher() as publisher:
        publisher.submit(slow, label="2")
        assert reached.wait(SOON_S)
        assert latest(volume, "run", "weights").checkpoint.publication.order == 1
        go.set()
    assert latest(volume, "run", "weights").checkpoint.publication.order == 2


SCRIPT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from lilo_volume import AsyncPublisher, LocalVolume, SoloGroup, begin

def save():
    time.sleep(0.2)
    with ThreadPoolExecutor(2) as pool:  # pools must still take work while saves end
        list(pool.map(str, range(4)))
    with begin(LocalVolume(sys.argv[1]), SoloGroup(), collection="run", kind="w", name="1", order=1) as attempt:
        with attempt.create("shard") as file:
            file.write(b"x")
        {action}
        attempt.publish()

publisher = AsyncPublisher({options})
pending = publisher.submit(save, label="step 1")
{after}
print("main ends", flush=True)
"""


def run_script(tmp_path, *, action="pass", options="", after="pass"):
    script = SCRIPT.format(action=action, options=options, after=after)
    return subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "v")],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_process_does_not_end_before_its_saves(tmp_path):
    from lilo_volume import LocalVolume

    done = run_script(tmp_path)
    assert (done.returncode, done.stdout) == (0, "main ends\n"), done.stderr
    assert latest(LocalVolume(tmp_path / "v"), "run", "w", verify="full").checkpoint is not None


def test_an_error_that_nobody_heard_makes_the_exit_code_one(tmp_path):
    done = run_script(tmp_path, action='raise OSError("disk full")')
    assert done.returncode == 1
    assert done.stdout == "main ends\n"
    assert "disk full" in done.stderr


def test_an_error_that_was_heard_leaves_the_exit_code_alone(tmp_path):
    after = "\ntry:\n    pending.result()\nexcept OSError:\n    pass"
    done = run_script(tmp_path, action='raise OSError("disk full")', after=after)
    assert done.returncode == 0, done.stderr


def test_a_save_that_hangs_does_not_hang_the_exit(tmp_path):
    done = run_script(tmp_path, action="time.sleep(3600)", options="exit_timeout_s=0.5")
    assert done.returncode == 1
    assert "step 1" in done.stderr


def test_a_group_that_loses_a_rank_is_heard_at_the_next_save(volume):
    groups = thread_groups(2)
    groups[1].close()

    def step():
        return begin(
            volume, groups[0], collection="run", kind="w", name="1", order=1, timeout_s=SOON_S
        )

    publisher = AsyncPublisher()
    publisher.submit(step, label="1")
    with pytest.raises(GroupTimeout):
        publisher.submit(step, label="2", timeout_s=SOON_S)
    publisher.close(SOON_S)
