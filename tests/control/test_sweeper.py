"""What ends by itself, with time as an argument."""

from __future__ import annotations

import anyio
import pytest
from lilo_engine.control.sessions import NewSession
from lilo_engine.control.sweeper import Sweeper, SweepSettings, end_session
from lilo_engine.errors import Gone, NotFound, Unavailable
from lilo_engine.operations.reference import CheckpointRef

from tests.control.conftest import Samples, Unloads

pytestmark = pytest.mark.anyio

SETTINGS = SweepSettings(session_idle_s=300, unnamed_versions=2)


def sweeper(plane, engine: Unloads, samples: Samples | None = None) -> Sweeper:
    return Sweeper(plane.control, engine, samples or Samples(), SETTINGS)


async def test_a_silent_session_ends_with_its_models_and_a_live_one_does_not(plane):
    sessions, engine = plane.control.sessions, Unloads()
    silent = await sessions.create(NewSession(), plane.now_s)
    live = await sessions.create(NewSession(), plane.now_s)
    gone, kept = await plane.run(silent), await plane.run(live)
    await sessions.touch(live, plane.now_s + 290)
    await sweeper(plane, engine).sweep(plane.now_s + 301)
    assert engine.unloaded == [gone]
    assert kept not in engine.unloaded
    await sessions.touch(live, plane.now_s + 302)
    with pytest.raises(Gone):
        await sessions.touch(silent, plane.now_s + 302)


async def test_a_model_that_waits_for_its_slot_when_its_session_ends_is_taken_out_of_the_line(
    plane,
):
    over = await plane.control.sessions.create(NewSession(), plane.now_s)
    live = await plane.control.sessions.create(NewSession(), plane.now_s + 200)
    # Neither has become resident, so that no record tells of them; one id has no session at all.
    names = (f"{over}:train:0", f"{live}:train:0", "nobody:train:0")
    engine = Unloads(resident=names)
    await sweeper(plane, engine).sweep(plane.now_s + 301)
    assert engine.unloaded == [names[0]]


async def test_a_session_just_under_the_limit_lives_on(plane):
    session_id = await plane.control.sessions.create(NewSession(), plane.now_s)
    await sweeper(plane, Unloads()).sweep(plane.now_s + 300)
    await plane.control.sessions.touch(session_id, plane.now_s + 300)


async def test_a_session_heard_of_while_another_is_being_ended_lives_on(plane):
    sessions = plane.control.sessions
    first, second = [await sessions.create(NewSession(), plane.now_s) for _ in range(2)]
    await plane.run(first)

    class Heard(Unloads):
        async def unload(self, model_id, reason):
            await sessions.touch(second, plane.now_s + 301)

    await sweeper(plane, Heard()).sweep(plane.now_s + 301)
    assert sessions.alive() == {second}


async def test_a_session_takes_its_sampling_sessions_along(plane):
    session_id = await plane.control.sessions.create(NewSession(), plane.now_s)
    model_id, samples = await plane.run(session_id), Samples()
    await plane.snapshot(model_id, "ephemeral-0", f"{session_id}:sample:0")
    await end_session(plane.control, Unloads(), samples, session_id, "over", plane.now_s)
    assert samples.forgotten == [f"{session_id}:sample:0"]
    # A save that was under way publishes after the end; its sampling session ends with the next sweep.
    await plane.snapshot(model_id, "ephemeral-1", f"{session_id}:sample:1")
    await sweeper(plane, Unloads(), samples).sweep(plane.now_s)
    assert f"{session_id}:sample:1" in samples.forgotten[1:]
    assert await plane.control.sampling_sessions.of_session(session_id) == [
        f"{session_id}:sample:0",
        f"{session_id}:sample:1",
    ]


async def test_an_ended_session_can_be_looked_at_for_its_time(plane):
    session_id = await plane.control.sessions.create(NewSession(), plane.now_s)
    await plane.snapshot(await plane.run(session_id), "ephemeral-0", f"{session_id}:sample:0")
    await end_session(plane.control, Unloads(), Samples(), session_id, "over", plane.now_s)
    last_s = plane.now_s + SETTINGS.session_kept_s
    await sweeper(plane, Unloads()).sweep(last_s)
    assert (await plane.control.sessions.get(session_id)).end_reason == "over"
    assert await plane.control.sampling_sessions.get(f"{session_id}:sample:0") is not None
    await sweeper(plane, Unloads()).sweep(last_s + 1)
    with pytest.raises(NotFound):
        await plane.control.sessions.get(session_id)
    with pytest.raises(NotFound):
        await plane.control.sampling_sessions.get(f"{session_id}:sample:0")


async def test_the_first_reason_for_an_end_wins(plane):
    engine = Unloads()
    session_id = await plane.control.sessions.create(NewSession(), plane.now_s)
    await plane.run(session_id)
    for reason in ("first", "second"):
        await end_session(plane.control, engine, Samples(), session_id, reason, plane.now_s)
    assert (await plane.control.sessions.get(session_id)).end_reason == "first"
    assert len(engine.unloaded) == 1


async def test_ending_goes_on_when_the_engine_does_not_know_a_model(plane):
    session_id = await plane.control.sessions.create(NewSession(), plane.now_s)
    first, second = await plane.run(session_id, 0), await plane.run(session_id, 1)
    engine = Unloads(unknown=(first,))
    await end_session(plane.control, engine, Samples(), session_id, "over", plane.now_s)
    assert engine.unloaded == [second]


async def test_sessions_survive_a_restart_and_ended_ones_stay_ended(plane):
    alive = await plane.control.sessions.create(NewSession(), plane.now_s)
    over = await plane.control.sessions.create(NewSession(), plane.now_s)
    await plane.control.sessions.end(over, "finished", plane.now_s)
    control = plane.reopened()
    await control.sessions.touch(alive, plane.now_s)
    with pytest.raises(Gone):
        await control.sessions.touch(over, plane.now_s)
    with pytest.raises(NotFound):
        await control.sessions.touch("nobody", plane.now_s)


async def test_a_checkpoint_ends_with_its_lifetime(plane):
    model_id = await plane.run("s")
    await plane.save(model_id, "short", ttl_s=3600)
    await plane.save(model_id, "long")
    await sweeper(plane, Unloads()).sweep(plane.now_s + 3599)
    assert len(await plane.control.checkpoints.of_run(model_id)) == 2
    await sweeper(plane, Unloads()).sweep(plane.now_s + 3600)
    assert [e.ref.name for e in await plane.control.checkpoints.of_run(model_id)] == ["long"]


async def test_a_checkpoint_that_cannot_be_removed_keeps_no_other_from_ending(plane, monkeypatch):
    model_id = await plane.run("s")
    for name in ("stuck", "free"):
        await plane.save(model_id, name, ttl_s=3600)
    delete = plane.control.checkpoints.delete

    async def broken_disk(ref):
        if ref.name == "stuck":
            raise OSError("the disk is read-only")
        await delete(ref)

    monkeypatch.setattr(plane.control.checkpoints, "delete", broken_disk)
    await sweeper(plane, Unloads()).sweep(plane.now_s + 3601)
    assert [e.ref.name for e in await plane.control.checkpoints.of_run(model_id)] == ["stuck"]


async def test_the_newest_unnamed_snapshots_are_kept_and_older_ones_answer_gone(plane):
    model_id = await plane.run("s")
    for number in range(4):
        await plane.snapshot(model_id, f"ephemeral-{number}", f"s:sample:{number}")
    await plane.snapshot(model_id, "named", None)
    assert await plane.target("s:sample:0") is not None
    await sweeper(plane, Unloads()).sweep(plane.now_s)
    for number in (0, 1):
        with pytest.raises(Gone):
            await plane.target(f"s:sample:{number}")
    for number in (2, 3):
        assert await plane.target(f"s:sample:{number}") is not None
    assert [e.ref.name for e in await plane.control.checkpoints.of_run(model_id)] == ["named"]


async def test_an_old_snapshot_in_use_is_kept_until_it_is_free(plane):
    model_id = await plane.run("s")
    for number in range(3):
        await plane.snapshot(model_id, f"ephemeral-{number}", f"s:sample:{number}")
    oldest = await plane.target("s:sample:0")
    await sweeper(plane, Unloads(), Samples({oldest.name})).sweep(plane.now_s)
    assert await plane.target("s:sample:0") == oldest
    await sweeper(plane, Unloads()).sweep(plane.now_s)
    with pytest.raises(Gone):
        await plane.target("s:sample:0")


async def test_a_client_on_a_name_that_was_saved_again_is_told_so(plane):
    model_id = await plane.run("s")
    await plane.snapshot(model_id, "ephemeral-1", "s:sample:0")
    assert await plane.target("s:sample:0") is not None
    await plane.snapshot(model_id, "ephemeral-1", None)
    with pytest.raises(Gone):
        await plane.target("s:sample:0")


async def test_inflight_clients_move_to_the_newest_snapshot(plane):
    model_id = await plane.run("s")
    await plane.snapshot(model_id, "inflight-1", "s:sample:0")
    first = await plane.target("s:sample:0")
    await plane.snapshot(model_id, "inflight-2", "s:sample:1")
    moved = await plane.target("s:sample:0")
    assert moved != first
    assert moved == await plane.target("s:sample:1")
    plane.reopened()
    assert await plane.target("s:sample:0") == moved
    assert (await plane.control.sampling_sessions.get("s:sample:0")).ref == CheckpointRef(
        run_id=model_id, kind="sampler_weights", name="inflight-2"
    )


async def test_a_sweep_that_finds_the_records_away_says_so_in_one_line(plane, caplog):
    """The database is told by its guard, as one whose disk is full is."""

    def away(_):
        raise Unavailable("the records are away")

    clocks = anyio.Event()

    def clock():
        if plane.control.records.guard is None:
            plane.control.records.guard = away
        else:
            clocks.set()
        return plane.now_s

    settings = SweepSettings(interval_s=0.01)
    await plane.control.sessions.touch(
        await plane.control.sessions.create(NewSession(), plane.now_s), plane.now_s + 1
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Sweeper(plane.control, Unloads(), Samples(), settings).run, clock)
        with anyio.fail_after(10):
            await clocks.wait()
        tasks.cancel_scope.cancel()
    (line,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert "the records are away" in line
    assert all(record.exc_info is None for record in caplog.records)
