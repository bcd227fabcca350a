"""A run in several containers: the body is called again with the same run, on a new disk, and goes on."""

import shutil
import threading
from contextlib import contextmanager

import lilo_definitions
import pytest
import tinker
from lilo_engine.commands.launcher import MemoryLauncher
from lilo_engine.deploy import places, plan
from lilo_engine.deploy.bodies import Ending, run_trainer, timing_of
from lilo_engine.deploy.head import Timing
from lilo_engine.errors import ServerError
from lilo_engine.parts import Parts, open_control
from lilo_engine.sampling.launcher import MemorySamplerLauncher
from tinker import types

from tests.deploy.local_provider import LocalProvider, free_port

KEY = "tml-chain"
TINY = lilo_definitions.get("tiny")
ADAM = types.AdamParams(learning_rate=1e-2)
IDS = list(b"2+2=4")
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs={"target_tokens": IDS[1:]}
)
LIMIT_S = 20
APP = "lilo-tiny"


def in_memory(definition, data) -> Parts:
    """Trainer and sampler in this process."""
    return Parts(
        definition=definition,
        data=data,
        launcher=MemoryLauncher(definition=definition, checkpoints_root=data.checkpoints),
        sampler_launcher=MemorySamplerLauncher(definition),
        control=open_control(data),
    )


@pytest.fixture
def container(monkeypatch, tmp_path):
    """The variables of a container whose mounts and disk are folders here."""
    for name, value in plan(TINY).trainer.environment.items():
        monkeypatch.setenv(name, value)
    # A plain folder stands in for the volume, as on one's own machine.
    monkeypatch.delenv(places.CHECKPOINT_VOLUME)
    monkeypatch.setenv(places.CHECKPOINT_ROOT, str(tmp_path / "volume" / places.STATES_FOLDER))
    monkeypatch.setenv(places.DATA_DIR, str(tmp_path / "disk"))
    monkeypatch.setenv("LILO_API_KEY", KEY)
    return tmp_path


class Served(LocalProvider):
    """Tells when the run can be reached."""

    def __init__(self):
        super().__init__()
        self.ready = threading.Event()

    def publish_url(self, app, run, url):
        super().publish_url(app, run, url)
        self.ready.set()


@contextmanager
def life(provider, *, goes_on=True):
    """One container's life; at the end of the block it leaves, and the run goes on elsewhere or not."""
    ending, out = Ending(), {}

    def body():
        out["resumes"] = run_trainer(
            "r1",
            provider,
            ending=ending,
            timing=Timing(life_s=300),
            parts_of=in_memory,
            port=free_port(),
        )

    provider.ready.clear()
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert provider.ready.wait(LIMIT_S)
    try:
        yield provider.urls[f"{APP}/r1"], out
    finally:
        if goes_on:
            ending.leave.set()
        else:
            ending.end()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def connect(url):
    return tinker.ServiceClient(base_url=url, api_key=KEY)


def train(client, steps):
    for _ in range(steps):
        client.forward_backward([DATUM], "cross_entropy").result(LIMIT_S)
        client.optim_step(ADAM).result(LIMIT_S)


def loss(client):
    return client.forward([DATUM], "cross_entropy").result(LIMIT_S).metrics["loss:sum"]


def damage(volume, name):
    """Turn one bit of the largest file of a published state."""
    files = [p for p in (volume / places.STATES_FOLDER).rglob("*") if p.is_file()]
    mine = [p for p in files if f"/{name}/" in p.as_posix() and p.suffix != ".json"] or [
        p for p in files if f"/{name}/" in p.as_posix()
    ]
    largest = max(mine, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.mark.timeout(120)
def test_a_run_goes_on_from_its_newest_whole_state_in_the_next_container(container, monkeypatch):
    provider = Served()
    with life(provider) as (url, _):
        service = connect(url)
        client = service.create_lora_training_client(base_model="tiny", rank=4).result(LIMIT_S)
        train(client, 2)
        first = client.save_state("one").result(LIMIT_S).path
        at_first = loss(client)
        train(client, 2)
        client.save_state("two").result(LIMIT_S)
        assert loss(client) != at_first
    service.holder.close()
    assert provider.calls == [(APP, "r1")]

    damage(container / "volume", "two")
    shutil.rmtree(container / "disk")
    # The key of the first container is known from its records alone.
    monkeypatch.delenv("LILO_API_KEY")
    with life(provider, goes_on=False) as (url, out):
        service = connect(url)
        client = service.create_training_client_from_state_with_optimizer(first).result(LIMIT_S)
        assert loss(client) == at_first
        train(client, 1)
        assert loss(client) != at_first
        client.save_state("three").result(LIMIT_S)
    service.holder.close()
    (resume,) = out["resumes"]
    assert resume.path == first
    assert any("two" in skipped for skipped in resume.skipped)
    # Ended by somebody: nobody calls the next one.
    assert provider.calls == [(APP, "r1")]


def test_a_container_without_any_key_is_refused_with_the_secrets_name(container, monkeypatch):
    monkeypatch.delenv("LILO_API_KEY")
    provider = Served()
    with pytest.raises(ServerError, match=TINY.deployment.secrets[0]):
        run_trainer("r1", provider, parts_of=in_memory, port=free_port())
    assert provider.calls == []


def test_an_engine_that_no_package_brings_is_refused_by_name_before_anything_starts(
    container, monkeypatch
):
    pool = {"gpu": "H200", "gpus_per_replica": 1, "min_replicas": 1, "max_replicas": 1}
    asks = TINY.derive(sampler={"engine": "vllm", "pool": {**pool, "target_sequences": 4}})
    monkeypatch.setenv(places.DEFINITION, plan(asks).trainer.environment[places.DEFINITION])
    with pytest.raises(ServerError, match=r"sampler\.engine is 'vllm'"):
        run_trainer("r1", Served(), parts_of=in_memory)


def test_variables_that_are_missing_or_make_no_definition_are_named(container, monkeypatch):
    monkeypatch.setenv(places.DEFINITION, '{"name": "x"}')
    with pytest.raises(ServerError, match=places.DEFINITION):
        run_trainer("r1", Served())
    monkeypatch.delenv(places.APP)
    monkeypatch.delenv(places.DEFINITION)
    with pytest.raises(ServerError, match="LILO_"):
        run_trainer("r1", Served())


def test_a_life_ends_before_its_container_does():
    assert 23 * 3600 < timing_of(24.0).life_s < 24 * 3600
    assert 0 < timing_of(0.1).life_s < 360
