"""What each key used: in the metrics while a server runs, in the records afterwards, in `lilo keys list`."""

from __future__ import annotations

import json
import re

import httpx
import pytest
import tinker
from lilo_engine.cli.keys import app as keys_app
from lilo_engine.requests.front import FrontSettings
from tinker import types
from typer.testing import CliRunner

from tests.conformance.conftest import KEY, STRANGERS_KEY, serve
from tests.conformance.test_sdk import BATCH, step
from tests.conformance.test_ten_facts import trainer

TOKENS = sum(datum.model_input.length for datum in BATCH)
STEPS = 3


def owner_of(key: str, served) -> str:
    """The owner that a key's runs are listed with."""
    with httpx.Client(base_url=served.url, headers={"X-API-Key": key}) as http:
        runs = http.get("/api/v1/training_runs").json()["training_runs"]
    return runs[0]["model_owner"]


def metrics(key: str, served) -> dict[tuple[str, str], float]:
    """(owner, kind) -> tokens."""
    text = httpx.get(f"{served.url}/metrics", headers={"X-API-Key": key}).text
    line = re.compile(r'lilo_usage_tokens_total\{kind="(\w+)",owner="(\w+)"\} (\S+)')
    return {(owner, kind): float(value) for kind, owner, value in line.findall(text)}


@pytest.mark.timeout(60)
def test_what_each_key_used_is_counted_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    running = serve(tmp_path, FrontSettings(long_poll_s=5.0))
    served = next(running)
    for key, steps in ((KEY, STEPS), (STRANGERS_KEY, 1)):
        service = tinker.ServiceClient(base_url=served.url, api_key=key)
        client = trainer(service)
        for _ in range(steps):
            step(client)
        sampler = service.create_sampling_client(base_model="tiny").result(timeout=20)
        params = types.SamplingParams(max_tokens=5, seed=1, stop=[])
        sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params).result(timeout=20)
        service.close("success").result(timeout=20)
    mine, theirs = owner_of(KEY, served), owner_of(STRANGERS_KEY, served)
    expected = {"trained": STEPS * TOKENS, "prompt": 2, "sampled": 10}
    assert metrics(KEY, served) == {(mine, kind): value for kind, value in expected.items()}
    assert set(metrics(STRANGERS_KEY, served)) == {(theirs, kind) for kind in expected}
    assert f'lilo_usage_device_seconds_total{{owner="{mine}"}}' in served.http.get("/metrics").text
    assert theirs not in served.http.get("/metrics").text
    assert next(running, None) is None, "it stopped"
    listed = CliRunner().invoke(keys_app, ["list", "--json", "--data-dir", str(tmp_path)])
    used = {key["owner"]: key["used"] for key in json.loads(listed.stdout)}
    assert used[mine]["trained_tokens"] == STEPS * TOKENS
    assert used[theirs]["trained_tokens"] == TOKENS
    assert (used[mine]["prompt_tokens"], used[mine]["sampled_tokens"]) == (2, 10)
    assert used[mine]["device_s"] > 0
    assert used[theirs]["device_s"] > 0
    shown = CliRunner().invoke(keys_app, ["list", "--data-dir", str(tmp_path)]).stdout
    assert f"used {STEPS * TOKENS} trained, 2 prompt, 10 sampled tokens" in shown


def test_an_operators_key_sees_what_everybody_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    running = serve(tmp_path, FrontSettings(long_poll_s=5.0))
    served = next(running)
    created = CliRunner().invoke(
        keys_app, ["create", "watcher", "--operator", "--data-dir", str(tmp_path)]
    )
    service = tinker.ServiceClient(base_url=served.url, api_key=KEY)
    step(trainer(service))
    watcher = created.stdout.strip()
    assert (owner_of(KEY, served), "trained") in metrics(watcher, served)
    with httpx.Client(base_url=served.url, headers={"X-API-Key": watcher}) as http:
        run_id = served.http.get("/api/v1/training_runs").json()["training_runs"][0]
        name = run_id["training_run_id"]
        assert name in http.get("/api/v1/console/state").text
        assert http.get(f"/api/v1/console/runs/{name}").status_code == 200
        assert http.get(f"/api/v1/training_runs/{name}").status_code == 404, "it only watches"
    service.close("success").result(timeout=20)
    assert next(running, None) is None
