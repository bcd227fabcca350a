"""Real processes over PostgreSQL: one engine (trainer and sampler in memory), two fronts, the SDK at each; then kills."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
import tinker

from tests.conformance.conftest import Served
from tests.conformance.test_sdk import loss_of, step
from tests.conformance.test_ten_facts import ADAM, example, trainer
from tests.control.postgres import database
from tests.processes.command import Command, engine, front

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KEY = "tml-processes"
SECONDS = 10.0
"""What "within seconds" means here, on a machine that does other things too."""


@dataclass
class Site:
    """One engine and two fronts."""

    data_dir: Path
    url: str
    engine: Command
    fronts: list[Command]
    started: list[Command]
    services: list[tinker.ServiceClient] = field(default_factory=list)

    def new_engine(self) -> Command:
        self.started.append(engine(self.data_dir, self.url, in_memory=True))
        return self.started[-1]

    def new_front(self, port: int = 0) -> Command:
        self.started.append(front(self.data_dir, self.url, key=KEY, port=port))
        return self.started[-1]

    def raw(self, index: int) -> Served:
        http = httpx.Client(base_url=self.fronts[index].url, headers={"X-API-Key": KEY}, timeout=40)
        return Served(url=self.fronts[index].url, http=http, data_dir=self.data_dir)

    def service(self, index: int) -> tinker.ServiceClient:
        self.services.append(tinker.ServiceClient(base_url=self.fronts[index].url, api_key=KEY))
        return self.services[-1]

    def close(self) -> None:
        for each in self.services:
            each.close("success").result(timeout=20)
        for command in self.started:
            command.stop()
        for command in self.started:
            command.__exit__()


@pytest.fixture(scope="module")
def site(tmp_path_factory, postgres) -> Iterator[Site]:
    """Every test leaves it as whole as it found it."""
    data_dir = tmp_path_factory.mktemp("site")
    with database(postgres) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        first = engine(data_dir, url, in_memory=True)
        made = Site(data_dir=data_dir, url=url, engine=first, fronts=[], started=[first])
        try:
            first.wait_ready()
            made.fronts = [made.new_front() for _ in range(2)]
            for each in made.fronts:
                each.wait_ready()
            yield made
        finally:
            made.close()


def raised(call: Callable[[], object]) -> tuple[Exception, float]:
    """The error of a call, and after how many seconds it came."""
    began = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
        call()
    return caught.value, time.monotonic() - began


def parked(raw: Served, model_id: str) -> str:
    """A request whose predecessor never came: it is in flight for as long as its engine lives."""
    body = {"model_id": model_id, "seq_id": 1000, "adam_params": {}}
    return raw.post("optim_step", body).json()["request_id"]


def answer_of(raw: Served, request_id: str) -> tuple[httpx.Response, float]:
    """What polls come to, and after how many seconds."""
    began = time.monotonic()
    while (answer := raw.retrieve(request_id)).status_code == 408:
        assert time.monotonic() - began < 60, answer.text
    return answer, time.monotonic() - began


def test_a_killed_front_costs_its_clients_a_delay_and_nothing_else(site):
    client = trainer(site.service(0), seed=3)
    step(client)
    port = int(site.fronts[0].url.rpartition(":")[2])
    site.fronts[0].kill()
    began = client.forward_backward([example([1, 2, 3])], "cross_entropy")
    site.fronts[0] = site.new_front(port).wait_ready()
    # Number 3 was on its way when there was no front; it and those after it are one series.
    assert began.result(timeout=60).metrics["loss:sum"] > 0
    client.optim_step(ADAM).result(timeout=30)
    path = client.save_state("after").result(timeout=30).path
    other = site.service(1).create_training_client_from_state_with_optimizer(path)
    assert loss_of(other.result(timeout=30)) == pytest.approx(loss_of(client), abs=1e-6)


def test_a_killed_engine_is_followed_by_one_that_says_what_is_gone_and_has_all_checkpoints(site):
    services = [site.service(0), site.service(1)]
    clients = [trainer(service, seed=3) for service in services]
    paths = []
    for client in clients:
        step(client)
        paths.append(client.save_state("kept").result(timeout=30).path)
    losses = [loss_of(client) for client in clients]
    raw = site.raw(1)
    model_id = clients[0].get_info().model_id
    in_flight = parked(raw, model_id)
    site.engine.kill()
    following = site.new_engine()
    error, seconds = raised(lambda: clients[1].optim_step(ADAM).result(timeout=60))
    following.wait_ready()
    assert "ended" in str(error) or "gone" in str(error)
    answer, more = answer_of(raw, in_flight)
    assert answer.status_code == 410, answer.text
    assert "create a new one" in answer.json()["detail"]
    assert more < SECONDS
    assert following.epoch == site.engine.epoch + 1
    # The old ids are of models that have ended; the clients' sessions and their checkpoints are there.
    site.engine = following
    body = {"session_id": model_id.split(":")[0], "model_seq_id": 0, "base_model": "tiny"}
    assert raw.post("create_model", body).status_code == 410
    rest = tinker.RestClient(base_url=site.fronts[0].url, api_key=KEY)
    for service, path, loss in zip(services, paths, losses, strict=True):
        run_id = path.removeprefix("tinker://").split("/")[0]
        listed = rest.list_checkpoints(run_id).result(timeout=30)
        assert [each.tinker_path for each in listed.checkpoints] == [path]
        resumed = service.create_training_client_from_state_with_optimizer(path).result(timeout=30)
        assert loss_of(resumed) == pytest.approx(loss, abs=1e-6)
        step(resumed)
        assert resumed.get_info().model_id != run_id
    assert seconds < 60


def test_a_sample_waits_for_the_next_engine_and_one_that_went_with_the_last_is_to_be_sent_again(
    site,
):
    sampler = site.service(0).create_sampling_client(base_model="tiny").result(timeout=30)
    prompt = tinker.types.ModelInput.from_ints([1, 2, 3])
    params = tinker.types.SamplingParams(max_tokens=4, seed=1)
    first = sampler.sample(prompt, 1, params).result(timeout=30)
    raw = site.raw(1)
    body = {
        "sampling_session_id": raw.sampler(),
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
    }
    taken = raw.post("asample", body).json()["request_id"]
    site.engine.kill()
    waiting = sampler.sample(prompt, 1, params)
    site.engine = site.new_engine().wait_ready()
    assert waiting.result(timeout=60).sequences[0].tokens == first.sequences[0].tokens
    # The SDK takes a 410 as "send it again", and the same number is free again.
    assert answer_of(raw, taken)[0].status_code == 410
    assert raw.finished(raw.post("asample", body)).status_code == 200


def test_a_second_engine_is_refused_by_the_name_of_the_first(site):
    second = site.new_engine()
    assert second.wait_end(60) == 1
    assert f"pid {site.engine.process.pid}" in second.output
    assert site.engine.url in second.output
    step(trainer(site.service(0)))


def test_a_database_that_was_away_costs_a_delay_and_no_model(site):
    client = trainer(site.service(0))
    step(client)
    raw = site.raw(1)
    with connections_refused(site.url):
        deadline = time.monotonic() + 20
        while (answer := raw.post("create_session", {"tags": []})).status_code != 503:
            assert time.monotonic() < deadline, answer.text
        assert "records" in answer.json()["detail"]
    step(client)
    assert raw.post("create_session", {"tags": []}).status_code == 200


@contextmanager
def connections_refused(url: str) -> Iterator[None]:
    """The database is there, and nobody can use it."""
    address = sa.make_url(url)
    server = sa.create_engine(address.set(database="postgres"), isolation_level="AUTOCOMMIT")
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
    with server.connect() as connection:
        connection.execute(sa.text(f"ALTER DATABASE {address.database} ALLOW_CONNECTIONS false"))
        try:
            connection.execute(sa.text(cut), {"name": address.database})
            yield
        finally:
            connection.execute(sa.text(f"ALTER DATABASE {address.database} ALLOW_CONNECTIONS true"))
    server.dispose()


def test_a_stopped_engine_that_wakes_after_its_lease_was_taken_changes_nothing_and_ends(site):
    client = trainer(site.service(0))
    step(client)
    site.engine.signal(signal.SIGSTOP)
    following = site.new_engine().wait_ready()
    error, seconds = raised(lambda: client.optim_step(ADAM).result(timeout=60))
    assert "ended" in str(error) or "gone" in str(error)
    assert seconds < SECONDS
    resumed = trainer(site.service(1))
    step(resumed)
    before = tables(site.url)
    site.engine.signal(signal.SIGCONT)
    assert site.engine.wait_end(30) == 1
    assert f"pid {following.process.pid}" in site.engine.output
    assert f"took it (epoch {following.epoch})" in site.engine.output
    assert tables(site.url) == before
    site.engine = following
    step(resumed)


def tables(url: str) -> dict[str, list[object]]:
    """Everything that an engine alone writes."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = {
            table: sorted(map(str, connection.execute(sa.text(f"SELECT {columns} FROM {table}"))))
            for table, columns in (
                ("runs", "run_id, ended_s, end_reason"),
                ("checkpoints", "run_id, kind, name, attempt"),
                ("leases", "epoch, holder, held"),
            )
        }
    engine.dispose()
    return found
