"""History: passes lie in files when memory is short, snapshots release them, and what is kept makes the state again."""

from dataclasses import replace

import anyio
import pytest
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_engine.history.history import History, HistorySettings
from lilo_engine.history.segments import Segments
from lilo_engine.operations.fingerprint import fingerprint
from lilo_engine.operations.ids import SUSPENDED_NAME
from lilo_engine.operations.ledger import Ledger
from lilo_engine.operations.operation import ModelId
from lilo_engine.operations.reference import CheckpointRef
from lilo_engine.operations.result import Passed

from tests.engine.repeat import repeated, same

pytestmark = pytest.mark.anyio

DATUM_TOKENS = 512
PASS_BYTES = 512 * 12 + 1024
"""int32 ids and int64 targets, and what a datum costs beside them."""


@pytest.fixture
def engine_with(running, tmp_path):
    """A running engine with settings of its history."""

    def start(segments=None, **settings):
        return running(
            history=HistorySettings(**settings), segments=segments or tmp_path / "segments"
        )

    return start


def long_pass(build, model_id, seq_id, **fields):
    datums = (build.datum(n=DATUM_TOKENS, start=seq_id),)
    return build.forward_backward(model_id, seq_id, datums=datums, **fields)


async def caught_up(rig):
    with anyio.fail_after(10):
        await rig.engine.files.caught_up()


@pytest.mark.parametrize(
    "settings",
    [{}, {"memory_bytes": 0}, {"eager_bytes": 0}, {"memory_bytes": 0, "uncovered_bytes": 20_000}],
    ids=["memory", "files", "eager", "files and snapshots"],
)
async def test_snapshot_and_recorded_operations_give_the_state_of_the_trainer(
    build, tmp_path, engine_with, settings
):
    async with engine_with(**settings) as rig:
        for name in ("a", "b"):
            await rig.create(build.model(name))
        for number in range(1, 16, 3):
            for name in ("a", "b"):
                ids = [
                    await rig.engine.submit(long_pass(build, name, number)),
                    await rig.engine.submit(long_pass(build, name, number + 1)),
                    await rig.engine.submit(build.step(name, number + 2)),
                ]
                for request_id in ids:
                    await rig.result(request_id)
        await rig.do(long_pass(build, "a", 16))
        await rig.do(build.forward_backward("a", 17, forward_only=True))
        # It waits for its lane, so that nothing is being saved any more.
        await rig.do(build.save("b", 16))
        await caught_up(rig)
        for name in ("a", "b"):
            live = rig.backend._adapters[ModelId(name)]
            again, plans = await repeated(
                rig.engine, ModelId(name), build.lora(), tmp_path / "checkpoints"
            )
            assert same(again, live)
            assert [plan.number for plan in plans] == sorted(plan.number for plan in plans)
        by_itself = [p.name for p in rig.journal.checkpoints if p.name != "state"]
        assert bool(by_itself) == ("uncovered_bytes" in settings)


async def test_what_waits_lies_in_files_and_runs_as_if_it_had_stayed_in_memory(build, engine_with):
    async def logprobs(**settings):
        async with engine_with(**settings) as rig:
            await rig.create(build.model("m"))
            ids = [await rig.engine.submit(long_pass(build, "m", n)) for n in range(2, 40)]
            await caught_up(rig)
            memory, files = rig.engine.history.payloads.memory_bytes, rig.engine.files.size_bytes
            ids.append(await rig.engine.submit(long_pass(build, "m", 1)))
            results = [await rig.result(request_id) for request_id in ids]
            assert all(isinstance(result, Passed) for result in results)
            return memory, files, [result.logprobs for result in results]

    memory, files, numbers = await logprobs(memory_bytes=4 * PASS_BYTES)
    assert memory <= 4 * PASS_BYTES
    assert files > 30 * DATUM_TOKENS * 12
    assert (await logprobs())[2] == numbers


async def test_a_saved_state_releases_everything_before_its_last_step(build, tmp_path, engine_with):
    async with engine_with(memory_bytes=0) as rig:
        await rig.create(build.model("m"))
        await rig.do(long_pass(build, "m", 1))
        await rig.do(build.step("m", 2))
        await rig.do(long_pass(build, "m", 3))
        saved = await rig.do(build.save("m", 4))
        assert rig.engine.history.base(ModelId("m")).source == saved.ref
        assert [done.seq_id for done in rig.engine.history.done(ModelId("m"))] == [3]
        await caught_up(rig)
        held = rig.engine.files.size_bytes
        await rig.do(build.step("m", 5))
        await rig.do(build.save("m", 6, name="later"))
        await caught_up(rig)
        assert held > 0
        assert rig.engine.files.size_bytes == 0
        await rig.engine.unload(ModelId("m"), "the test ends")
        await caught_up(rig)
        assert rig.engine.history.uncovered_bytes == 0
        assert rig.engine.history.payloads.memory_bytes == 0
    assert not (tmp_path / "segments").exists()


async def test_a_window_that_was_dropped_and_a_state_that_was_replaced_are_not_repeated(
    build, tmp_path, engine_with
):
    async with engine_with() as rig:
        await rig.create(build.model("m"))
        await rig.do(long_pass(build, "m", 1))
        await rig.do(build.step("m", 2))
        saved = await rig.do(build.save("m", 3))
        await rig.do(long_pass(build, "m", 4))
        bad = await rig.engine.submit(long_pass(build, "m", 5, loss="nonsense"))
        assert isinstance(await rig.error(bad), InvalidRequest)
        await rig.error(await rig.engine.submit(build.step("m", 6)))
        assert list(rig.engine.history.done(ModelId("m"))) == []
        await rig.do(long_pass(build, "m", 7))
        await rig.do(build.step("m", 8))
        await rig.do(build.load("m", 9, saved.ref))
        await rig.do(long_pass(build, "m", 10))
        again, _ = await repeated(rig.engine, ModelId("m"), build.lora(), tmp_path / "checkpoints")
        assert same(again, rig.backend._adapters[ModelId("m")])


async def test_the_engine_saves_between_two_windows_and_trains_on_when_that_fails(
    build, engine_with
):
    async with engine_with(uncovered_operations=4) as rig:
        await rig.create(build.model("m"))
        rig.backend.raises["capture"] = CommandFailed("no room")
        for number in range(1, 25, 2):
            await rig.do(long_pass(build, "m", number))
            await rig.do(build.step("m", number + 1))
        captures = [n for n, entry in enumerate(rig.backend.log) if entry[0] == "capture"]
        assert len(captures) >= 2
        assert all(rig.backend.log[n - 1][0] == "optim_step" for n in captures)
        saved = await rig.do(build.save("m", 25))
        assert len(rig.journal.checkpoints) >= 2
        # Both hold the last step; which of the two is durable first is chance.
        own = replace(saved.ref, name=SUSPENDED_NAME)
        assert rig.engine.history.base(ModelId("m")).source in (saved.ref, own)
        assert rig.engine.history.done(ModelId("m")) == ()


@pytest.mark.parametrize(
    "settings", [{"uncovered_operations": 4}, {"uncovered_bytes": 4 * PASS_BYTES}], ids=str
)
async def test_a_window_that_is_never_closed_keeps_no_other_model_from_being_saved(
    build, engine_with, settings
):
    def num_saves():
        return [entry[0] for entry in rig.backend.log].count("capture")

    async with engine_with(**settings) as rig:
        for name in ("open", "m", "n"):
            await rig.create(build.model(name))
        for number in range(1, 9):
            await rig.do(long_pass(build, "open", number))
        await rig.do(long_pass(build, "n", 1))
        await rig.do(build.step("n", 2))
        assert num_saves() == 0, "what is in the open window makes nobody else be saved early"
        for number in range(1, 13, 2):
            await rig.do(long_pass(build, "m", number))
            await rig.do(build.step("m", number + 1))
        assert 1 <= num_saves() <= 3


@pytest.mark.parametrize("ends", ["a step", "a refused step", "a load"])
async def test_a_window_that_grows_for_ever_is_let_go_until_the_next_snapshot(
    build, tmp_path, engine_with, ends
):
    limit = 4 * PASS_BYTES
    model = ModelId("m")
    async with engine_with(uncovered_bytes=limit, memory_bytes=0) as rig:
        await rig.create(build.model("m"))
        await rig.do(build.forward_backward("m", 1))
        await rig.do(build.step("m", 2))
        early = await rig.do(build.save("m", 3))
        await rig.do(build.forward_backward("m", 4))
        await rig.do(build.step("m", 5))
        for number in range(6, 16):
            await rig.do(long_pass(build, "m", number))
        assert rig.engine.kept_bytes()["uncovered"] <= limit
        assert not rig.engine.history.is_kept(model)
        await caught_up(rig)
        assert not list((tmp_path / "segments").glob("segment-*"))
        if ends == "a step":
            await rig.do(build.step("m", 16))
        elif ends == "a load":
            await rig.do(build.load("m", 16, early.ref))
        else:
            await rig.error(await rig.engine.submit(build.forward_backward("m", 16, loss="no")))
            await rig.error(await rig.engine.submit(build.step("m", 17)))
        assert rig.engine.history.is_kept(model) == (ends == "a load")
        saved = await rig.do(build.save("m", 18 if ends == "a refused step" else 17, name="late"))
        assert rig.engine.history.is_kept(model)
        base = rig.engine.history.base(model)
        assert base.source == (early.ref if ends == "a load" else saved.ref)
        number = 19 if ends == "a refused step" else 18
        await rig.do(long_pass(build, "m", number))
        assert [done.seq_id for done in rig.engine.history.done(model)] == [number]


def test_a_save_from_before_a_load_is_no_snapshot_of_what_came_after_it(build):
    def entry(seq_id):
        parked = ledger.submit(
            operation := build.forward_backward("m", seq_id), fingerprint(operation), None
        )
        history.payloads.park(parked)
        return parked

    model, ledger = ModelId("m"), Ledger(model_id=ModelId("m"), max_queued=8)
    history = History.empty(HistorySettings(uncovered_operations=1))
    plan = history.planned([], "the test's")
    loaded, saved = (CheckpointRef(run_id=model, kind="weights", name=n) for n in ("old", "new"))
    history.opened(build.model("m"))
    history.stepped(build.step("m", 5), plan)
    history.captured("capture", model)
    history.loaded(build.load("m", 7, loaded))
    for seq_id in (8, 9):
        history.passed(model, entry(seq_id), plan)
    history.dropped(model)
    history.published("capture", saved)
    assert history.base(model).source == loaded
    assert not history.is_kept(model)
    history.captured("later", model)
    history.published("later", saved)
    assert history.base(model).source == saved
    assert history.is_kept(model)


async def test_a_disk_that_takes_nothing_stops_nobody(build, tmp_path, engine_with):
    blocked = tmp_path / "a file"
    blocked.write_text("not a folder")
    async with engine_with(segments=blocked, memory_bytes=0) as rig:
        await rig.create(build.model("m"))
        await rig.do(long_pass(build, "m", 1))
        await rig.do(build.step("m", 2))
        assert rig.engine.history.payloads.memory_bytes > 0


@pytest.mark.parametrize("forward_only", [False, True])
async def test_a_pass_whose_file_was_cut_fails_alone_and_spoils_the_window_it_was_to_add_to(
    build, tmp_path, engine_with, forward_only
):
    async with engine_with(memory_bytes=0) as rig:
        for name in ("m", "n"):
            await rig.create(build.model(name))
        lost = await rig.engine.submit(long_pass(build, "m", 2, forward_only=forward_only))
        await caught_up(rig)
        (segment,) = (tmp_path / "segments").iterdir()
        with segment.open("r+b") as file:
            file.truncate(100)
        rig.backend.hold("forward_backward")
        first = await rig.engine.submit(long_pass(build, "m", 1))
        await rig.reached("forward_backward")
        other = await rig.engine.submit(build.forward_backward("n", 1))
        step = await rig.engine.submit(build.step("m", 3))
        rig.backend.let_go("forward_backward")
        await rig.result(first)
        assert isinstance(await rig.error(lost), CommandFailed)
        await rig.result(other)
        if forward_only:
            await rig.result(step)
        else:
            assert isinstance(await rig.error(step), CommandFailed)


def test_a_segment_goes_with_the_last_payload_in_it_and_leftovers_at_the_start(tmp_path):
    (tmp_path / "segment-000042").write_bytes(b"of a process that was killed")
    segments = Segments(tmp_path, segment_bytes=10)
    segments.clear()
    places = [segments.append(bytes([n]) * 6) for n in range(5)]
    assert [segments.read(place) for place in places] == [bytes([n]) * 6 for n in range(5)]
    assert len(list(tmp_path.iterdir())) == 3
    for place in places[:2]:
        segments.release(place)
    assert len(list(tmp_path.iterdir())) == 2
    assert segments.read(places[2]) == bytes([2]) * 6
    with pytest.raises(OSError, match="removed"):
        segments.read(places[0])
    segments.clear()
    assert list(tmp_path.iterdir()) == []
