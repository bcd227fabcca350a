"""The examples run as scripts against a real server, and the server of the demo starts, stops and starts again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
from lilo_engine.demo.server import LocalServer, ServerFailed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LocalServer("tiny", tmp_path_factory.mktemp("data")) as running:
        yield running


def run(server, script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    command += ["--base-url", server.base_url, "--api-key", server.api_key]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def losses(lines):
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("batch")]


def test_reinforcement_learning_runs_and_saves(server):
    lines = run(server, "rl_arithmetic.py", "--steps", 2)
    assert [line.split()[0] for line in lines] == ["before:", "step", "step", "after:", "saved:"]
    assert lines[-1].endswith("/weights/arithmetic")


def test_chats_are_learned(server, tmp_path):
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "yes yes yes"}]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(8)))
    lines = run(server, "sft.py", "--file", file, "--epochs", 12)
    assert losses(lines)[-1] < losses(lines)[0] / 2
    assert any(line.endswith("/sampler_weights/sft") for line in lines)


def test_a_plain_text_is_learned(server, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    lines = run(
        server, "sft.py", "--file", file, "--epochs", 6, "--batch-size", 4, "--max-tokens", 128
    )
    assert losses(lines)[-1] < losses(lines)[0] / 1.5
    # The server's only model was taken, and wrote before and after.
    before, after = (lines[lines.index(f"--- {when}") + 1] for when in ("before", "after"))
    assert before != after
    assert any(line.endswith(" s a step") for line in lines)


def test_a_stopped_server_goes_on_with_its_data_folder_and_its_key(server):
    assert server.stop() == 0
    server.start()
    assert LocalServer("tiny", server.data_dir).api_key == server.api_key
    client = tinker.RestClient(base_url=server.base_url, api_key=server.api_key)
    offered = client.get_server_capabilities().result(timeout=30)
    assert offered.supported_models[0].model_name == "tiny"


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ServerFailed, match="no definition"), LocalServer("tinny", tmp_path):
        pass
