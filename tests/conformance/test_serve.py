"""`lilo serve` at the command line: what it refuses in one line, and one whole life with real processes."""

from __future__ import annotations

import re
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from filelock import FileLock
from lilo_engine.cli.main import build
from typer.testing import CliRunner

from tests.conformance.test_ten_facts import ADAM, example, trainer


def refused(*arguments: str) -> str:
    """The one line that a refused command prints."""
    result = CliRunner().invoke(build(arguments[0]), list(arguments), env={"LILO_API_KEY": ""})
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_a_missing_definition_names_the_nearest(tmp_path):
    assert "tiny" in refused("serve", "tinny", "--data-dir", str(tmp_path))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / "file" / "data")
    assert folder in refused("serve", "tiny", "--data-dir", folder)


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused("serve", "tiny", "--port", port, "--data-dir", str(tmp_path))


def test_a_second_server_on_a_data_folder_is_refused(tmp_path):
    with FileLock(tmp_path / "lock"):
        line = refused("serve", "tiny", "--port", "0", "--data-dir", str(tmp_path))
    assert str(tmp_path) in line


def test_a_host_that_others_can_reach_needs_a_key(tmp_path):
    arguments = ["--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path)]
    assert "lilo keys create" in refused("serve", "tiny", *arguments)


def test_a_key_that_the_sdk_would_refuse_is_refused(tmp_path):
    arguments = ["--api-key", "secret", "--port", "0", "--data-dir", str(tmp_path)]
    assert "tml-" in refused("serve", "tiny", *arguments)


def test_an_empty_key_file_is_refused(tmp_path):
    (tmp_path / "key").touch()
    arguments = ["--api-key-file", str(tmp_path / "key"), "--port", "0"]
    assert "tml-" in refused("serve", "tiny", *arguments, "--data-dir", str(tmp_path))


def test_a_host_that_is_not_this_machine_is_named(tmp_path):
    line = refused("serve", "tiny", "--host", "999.1.1.1", "--data-dir", str(tmp_path))
    assert "999.1.1.1" in line
    assert "--host" in line


def test_records_that_are_no_database_are_named(tmp_path):
    (tmp_path / "records.sqlite3").write_text("something else\n" * 100)
    line = refused("serve", "tiny", "--port", "0", "--data-dir", str(tmp_path))
    assert str(tmp_path / "records.sqlite3") in line


def test_keys_of_a_folder_that_is_not_there_are_not_looked_for_in_a_new_one(tmp_path):
    folder = tmp_path / "mistyped"
    assert str(folder) in refused("keys", "list", "--data-dir", str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("since", ["tomorrow", "2026-13-01", "20261130", "2026-1-3"])
def test_a_day_that_is_none_is_refused_instead_of_counting_nothing(tmp_path, since):
    assert since in refused("keys", "list", "--since", since, "--data-dir", str(tmp_path))


def test_keys_are_made_listed_and_revoked(tmp_path):
    def run(*arguments: str) -> str:
        app = build("keys")
        result = CliRunner().invoke(app, ["keys", *arguments, "--data-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.stdout

    key = run("create", "ann").strip()
    assert key.startswith("tml-")
    listed = run("list")
    assert "ann" in listed
    assert key not in listed
    run("revoke", listed.split()[0])
    assert "revoked" in run("list")


def started(tmp_path: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server process and its URL."""
    program = [sys.executable, "-c", "from lilo_engine.cli import main; main()", "serve", "tiny"]
    arguments = [
        "--port",
        "0",
        "--data-dir",
        str(tmp_path),
        "--api-key-file",
        str(tmp_path / "key"),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen([*program, *arguments], stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 90
    while not (found := re.search(r"^lilo: serving tiny at (http\S+)$", log.read_text(), re.M)):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"not ready within 90 s: {log.read_text()}"
        time.sleep(0.05)
    return process, found[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_life_training_stopping_starting_again_and_resuming(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    batch = [example([1, 50, 60, 70])]
    process, url = started(tmp_path, tmp_path / "first.log")
    try:
        key = (tmp_path / "key").read_text().strip()
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
        assert httpx.get(f"{url}/api/v1/healthz").status_code == 200
        service = tinker.ServiceClient(base_url=url, api_key=key)
        client = trainer(service)
        client.forward_backward(batch, "cross_entropy").result(timeout=30)
        client.optim_step(ADAM).result(timeout=30)
        path = client.save_state("kept").result(timeout=30).path
        loss = client.forward(batch, "cross_entropy").result(timeout=30).metrics["loss:sum"]
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert time.monotonic() - began < 15
        # Its server is gone, so that there is nobody to tell; it stops asking.
        service.holder.close()
    finally:
        process.kill()
    process, url = started(tmp_path, tmp_path / "second.log")
    try:
        service = tinker.ServiceClient(base_url=url, api_key=key)
        resumed = service.create_training_client_from_state_with_optimizer(path).result(timeout=30)
        again = resumed.forward(batch, "cross_entropy").result(timeout=30).metrics["loss:sum"]
        assert again == pytest.approx(loss, abs=1e-6)
        service.close("success").result(timeout=20)
        assert stopped_while_polled(process, url, key) == [408] * 4
    finally:
        process.kill()
    lines = (tmp_path / "second.log").read_text().splitlines()
    assert lines == [f"lilo: serving tiny at {url}"], "the console has more than it should"


def open_connections(pid: int) -> int:
    """Connections that clients have to a server."""
    kinds = [each.status for each in psutil.Process(pid).net_connections("tcp")]
    return kinds.count(psutil.CONN_ESTABLISHED)


def stopped_while_polled(process: subprocess.Popen[bytes], url: str, key: str) -> list[int]:
    """Ctrl-C while clients wait for an operation whose predecessor never came; what they are answered."""
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=30) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        model_id = http.post("create_model", json=body).json()["model_id"]
        body = {"model_id": model_id, "seq_id": 2, "adam_params": {}}
        request_id = http.post("optim_step", json=body).json()["request_id"]

        def poll(_: int) -> int:
            return http.post("retrieve_future", json={"request_id": request_id}).status_code

        with ThreadPoolExecutor(4) as pool:
            polls = [pool.submit(poll, n) for n in range(4)]
            while open_connections(process.pid) < 4:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            answers = [each.result(timeout=5) for each in polls]
    assert process.wait(15) == 0
    return answers
