"""The SDK's own command line, `tinker`, against a real server; what it downloads is an adapter that PEFT loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
import torch
from lilo_definitions import get, resolve_source
from lilo_engine.demo.server import LocalServer
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    # What PEFT and transformers say of each other.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
IDS = [72, 101, 108, 108, 111]


def run(server: LocalServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`tinker ...` as its user would."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.base_url,
        "TINKER_API_KEY": server.api_key,
        "TINKER_TELEMETRY": "0",
    }
    return subprocess.run(
        [Path(sys.executable).with_name("tinker"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def listed(server: LocalServer) -> set[str]:
    answer = json.loads(run(server, "--format", "json", "checkpoint", "list").stdout)
    return {one["tinker_path"] for one in answer["checkpoints"]}


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = service.create_lora_training_client("tiny", rank=8, seed=1).result()
    targets = types.TensorData(data=IDS[1:], dtype="int64")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs={"target_tokens": targets}
    )
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return client


def test_checkpoints_are_listed_and_downloaded_and_the_adapter_works_in_peft(tmp_path):
    with LocalServer("tiny", tmp_path / "data") as server:
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        client = trained(service)
        state = client.save_state("kept").result().path
        weights = client.save_weights_for_sampler("drawn").result().path
        export = client.save_weights_external("export").result().path
        sampler = service.create_sampling_client(model_path=weights).result()
        expected = sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()[1:]
        assert listed(server) == {state, weights, export}
        for name, path in {"state": state, "export": export}.items():
            folder = tmp_path / name
            run(server, "checkpoint", "download", path, "--output", str(folder))
            (config,) = folder.rglob("adapter_config.json")
            assert_scores(config.parent, expected)
        assert listed(server) == {state, weights, export}, "what was made for a download is gone"
        service.close("success").result(timeout=20)


def assert_scores(adapter: Path, expected: list[float]) -> None:
    """The adapter on the base model gives the sampler's logprobs."""
    base = AutoModelForCausalLM.from_pretrained(
        resolve_source(get("tiny").model.source), dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-4)
