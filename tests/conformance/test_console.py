"""Console endpoints, `lilo trace` and `lilo report`, against a server that trained something."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lilo_engine.cli.main import build
from typer.testing import CliRunner

from tests.conformance.conftest import KEY, Served


@pytest.fixture(scope="module")
def run_id(served: Served) -> str:
    """A model with two steps and a save."""
    model_id = served.model()
    datum: dict[str, Any] = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3, 4, 5], "dtype": "int64"},
            "weights": {"data": [1.0, 1.0, 1.0, 1.0], "dtype": "float32"},
        },
    }
    for number in (1, 3):
        body = {
            "model_id": model_id,
            "seq_id": number,
            "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
        }
        served.finished(served.post("forward_backward", body), accept="application/json")
        step = {
            "model_id": model_id,
            "seq_id": number + 1,
            "adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        }
        served.finished(served.post("optim_step", step), accept="application/json")
    served.finished(
        served.post("save_weights", {"model_id": model_id, "seq_id": 5, "path": "end"}),
        accept="application/json",
    )
    return model_id


def lilo(*arguments: str) -> Any:
    return CliRunner().invoke(build(arguments[0]), list(arguments))


def test_the_console_shows_trainer_sampler_queue_lanes_and_models(served: Served, run_id: str):
    answer = served.http.get("/api/v1/console/state")
    assert answer.status_code == 200
    state = answer.json()
    assert state["trainer"]["phase"] == state["sampler"]["phase"] == "serving"
    # Other tests' clients use this server too; nothing of this run waits or runs.
    busy = [*state["queue"], *state["lanes"]["gpu"]]
    assert not [entry for entry in busy if run_id in str(entry)]
    assert run_id in [model["model_id"] for model in state["models"]]


def test_metrics_count_operations_and_answers(served: Served, run_id: str):
    text = served.http.get("/metrics").text
    assert 'lilo_operations_total{command="forward_backward",outcome="done"}' in text
    assert 'lilo_http_responses_total{status="200"}' in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/console/state", "/api/v1/console/trace"])
def test_nothing_is_told_without_a_key(served: Served, path: str):
    assert served.http.get(path, headers={"X-API-Key": "tml-wrong"}).status_code == 401


def test_lilo_trace_writes_the_timeline(served: Served, run_id: str, tmp_path):
    out = tmp_path / "trace.json"
    result = lilo("trace", str(out), "--base-url", served.url, "--api-key", KEY)
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text("utf-8"))["traceEvents"]
    mine = [e["cat"] for e in events if e["ph"] == "X" and run_id in e["args"]["models"]]
    step = ["forward_backward", "optim_step"]
    assert mine == ["create", *step, *step, "capture", "persist"]


def test_lilo_report_compares_a_run_with_an_earlier_report(served: Served, run_id: str, tmp_path):
    server = ("--base-url", served.url, "--api-key", KEY)
    saved = lilo("report", run_id, "--json", *server)
    assert saved.exit_code == 0, saved.output
    report = json.loads(saved.output)
    assert (report["steps"], report["passes"], report["tokens"]) == (2, 2, 8)
    assert report["publish_share"] > 0
    path = tmp_path / "report.json"
    path.write_text(saved.output, "utf-8")
    compared = lilo("report", run_id, "--against", str(path), *server)
    assert compared.exit_code == 0, compared.output
    assert "ratio" in compared.output
    assert run_id in " ".join(compared.output.split())


def test_lilo_report_says_in_one_line_what_is_wrong(served: Served, tmp_path):
    server = ("--base-url", served.url, "--api-key", KEY)
    missing = str(tmp_path / "missing.json")
    for arguments in [
        ("report", "nobody", *server),
        ("report", "nobody", "--base-url", "http://127.0.0.1:9"),
        ("report", "nobody", "--against", missing, *server),
    ]:
        result = lilo(*arguments)
        assert result.exit_code == 1
        assert len(result.output.strip().splitlines()) == 1
