"""What is secret stays so: keys and passwords are in no log, no process list, no child, no answer and no record."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import tinker

from tests.conformance.test_ten_facts import ADAM, example, trainer

KEY = "tml-a-secret-that-must-not-be-seen"
WRONG_KEY = "tml-another-secret-that-is-not-known"
PASSWORD = "a-password-of-the-records"


@dataclass(frozen=True)
class Running:
    """`lilo serve tiny` with its secrets in the environment, talkative."""

    url: str
    data_dir: Path
    console: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("secrets")
    console = folder / "console.log"
    # SQLite knows no passwords, and lets one be in the address all the same.
    records = f"sqlite:///file:{folder}/elsewhere.sqlite3?password={PASSWORD}&uri=true"
    environment = {
        **os.environ,
        "LILO_API_KEY": KEY,
        "LILO_RECORDS_URL": records,
        "LILO_LOG_LEVEL": "DEBUG",
    }
    program = [sys.executable, "-c", "from lilo_engine.cli import main; main()", "serve", "tiny"]
    options = ["--port", "0", "--data-dir", str(folder / "data")]
    with console.open("wb") as log:
        process = subprocess.Popen(
            [*program, *options], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        deadline = time.monotonic() + 90
        serving = re.compile(r"^lilo: serving tiny at (http\S+)$", re.M)
        while not (found := serving.search(console.read_text())):
            assert process.poll() is None, console.read_text()
            assert time.monotonic() < deadline, console.read_text()
            time.sleep(0.05)
        yield Running(found[1], folder / "data", console, process)
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_keys_and_passwords_are_in_no_log_process_list_child_answer_or_record(running, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    client = trainer(service)
    client.forward_backward([example([1, 50, 60])], "cross_entropy").result(timeout=60)
    client.optim_step(ADAM).result(timeout=60)
    path = client.save_weights_external("x").result(timeout=60).path
    rest = tinker.RestClient(base_url=running.url, api_key=KEY)
    links = list(rest.get_external_weights_urls(path).result(timeout=60).urls.values())
    assert httpx.get(links[0]).status_code == 200
    signature = re.search(r"signature=(\w+)", links[0])[1]
    refused = httpx.get(f"{running.url}/api/v1/sessions", headers={"X-API-Key": WRONG_KEY})
    assert refused.status_code == 401
    assert WRONG_KEY not in refused.text

    family = [psutil.Process(running.process.pid)]
    family += family[0].children(recursive=True)
    assert len(family) >= 3, "the server, its trainer and its sampler"
    for process in family:
        assert not hidden(" ".join(process.cmdline()))
    for child in family[1:]:
        assert not hidden(repr(child.environ()))
    service.close("success").result(timeout=30)

    files = [file for file in running.data_dir.rglob("*") if file.is_file()]
    files += [running.console, *running.console.parent.glob("elsewhere.sqlite3*")]
    assert any(file.suffix == ".log" for file in files)
    for file in files:
        content = file.read_bytes().decode("latin-1")
        assert not hidden(content), file
        assert signature not in content, file


def hidden(text: str) -> list[str]:
    """Which of the secrets are in a text."""
    return [secret for secret in (KEY, WRONG_KEY, PASSWORD) if secret in text]
