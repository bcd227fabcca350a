"""Names and ids that would lead out of the data folder lead nowhere: neither read nor written."""

from __future__ import annotations

import http.client
import sqlite3
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from lilo_engine.control.links import Links
from lilo_engine.control.records import Records

from tests.conformance.conftest import KEY

CANARY = "a word that no answer may have"
OUT = [
    "..",
    "../..",
    "../../records.sqlite3",
    "..%2f..%2frecords.sqlite3",
    "%2e%2e%2f%2e%2e%2frecords.sqlite3",
    "..\\..\\records.sqlite3",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "....//....//records.sqlite3",
    "x/../../../records.sqlite3",
    "x%00",
    "%00",
    "~",
    "$HOME",
    "con",
    "a" * 300,
]
BELOW = [
    "training_runs/{}",
    "training_runs/{}/checkpoints",
    "training_runs/{}/checkpoints/weights/x",
    "training_runs/x/checkpoints/{}/x",
    "training_runs/x/checkpoints/weights/{}",
    "training_runs/x/checkpoints/external_weights/{}/external_weights_urls",
    "downloads/weights/x/external_weights/{}/a/adapter_model.safetensors",
    "downloads/weights/x/external_weights/x/a/{}",
    "downloads/traces/{}",
    "samplers/{}",
    "sessions/{}",
    "console/runs/{}",
]


def get(served, path: str) -> tuple[int, bytes]:
    """As it is: other clients take dots out of an address."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request("GET", path, headers={"X-API-Key": KEY})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module", autouse=True)
def canary(served):
    """A file beside the data folder and one in it, which no name may reach."""
    files = [served.data_dir.parent / "canary.txt", served.data_dir / "canary.txt"]
    for file in files:
        file.write_text(CANARY)
    yield
    for file in files:
        file.unlink()


@pytest.mark.parametrize("below", BELOW)
def test_an_address_reads_nothing_outside_of_what_is_published(served, below):
    for name in [*OUT, "../canary.txt", "..%2f..%2fcanary.txt", "../../canary.txt"]:
        for form in (name, quote(name, safe="%")):
            if any(ord(c) <= 32 for c in form):
                continue
            status, body = get(served, f"/api/v1/{below.format(form)}")
            assert status in (400, 401, 404), (form, status, body)
            assert CANARY.encode() not in body
            assert b"SQLite format" not in body
            assert b"root:" not in body


NAMES = ["../x", "..", ".", "a/b", "a\\b", "/tmp/x", "x\x00", "x\n", " x", "", "\u202e" * 200]


@pytest.mark.parametrize(
    "call", ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
def test_a_name_writes_nothing_outside_of_the_volume(served, call):
    model_id = served.model()
    before = outside(served)
    for seq_id, name in enumerate(NAMES, start=1):
        body = {"model_id": model_id, "seq_id": seq_id, "path": name}
        refused = served.post(call, body)
        assert refused.status_code == 400, (name, refused.text)
        assert refused.json()["detail"]
    assert outside(served) == before


def outside(served) -> set[Path]:
    """Files in and beside the data folder that are no part of the volume, of the records or of a log."""
    found = set(served.data_dir.parent.glob("*")) | set(served.data_dir.glob("*"))
    return {file for file in found if "records" not in file.name}


@pytest.mark.parametrize(
    "path", ["../../..", "tinker://../weights/x", "tinker://a/../b", "tinker://a/weights/.."]
)
def test_a_path_of_a_checkpoint_has_no_steps_up(served, path):
    model_id = served.model()
    body = {"model_id": model_id, "seq_id": 1, "path": path, "optimizer": True}
    assert served.post("load_weights", body).status_code in (400, 404)
    assert served.post("weights_info", {"tinker_path": path}).status_code in (400, 404)
    copy = {"source_path": path, "destination_project_id": "p"}
    assert served.post("copy_weights", copy).status_code in (400, 404)


def test_a_link_with_the_right_signature_gives_only_what_a_manifest_lists(served):
    model_id = served.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "x"}
    served.finished(served.post("save_weights_external", body))
    links_of = f"training_runs/{model_id}/checkpoints/external_weights/x/external_weights_urls"
    good = next(iter(served.http.get(f"/api/v1/{links_of}").json()["urls"].values()))
    folder = good.removeprefix(served.url).split("?")[0].rpartition("/")[0]
    records = Records.at(served.data_dir)
    links = Links(records)
    for file in (
        "../manifest.json",
        "manifest.json",
        "../../../../../../records.sqlite3",
        "/etc/passwd",
        "",
    ):
        link = links.sign(f"{folder}/{file}", int(time.time()) + 60)
        status, _ = get(served, link)
        assert status == 404, file
    records.close()


def test_a_key_is_not_in_the_records(served):
    with sqlite3.connect(served.data_dir / "records.sqlite3") as database:
        dump = "\n".join(database.iterdump())
    database.close()
    assert "test" in dump
    assert KEY not in dump
