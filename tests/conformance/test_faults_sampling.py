"""Faults B21 and B23 that others met with sampling, each tried here through the SDK; named after them.

Server, trainer and sampler are the real ones, in processes of their own; two adapters fit into the sampler. A model is
trained until it writes one token only, so that an answer tells whose weights made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinker
from lilo_engine.demo.server import LocalServer
from tinker import types

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LIMIT_S = 60
PROMPT = [ord(letter) for letter in "12+30="]
ADAM = types.AdamParams(learning_rate=3e-2)
BUSY = types.SamplingParams(max_tokens=500, stop=[], seed=1)
"""Takes the sampler long enough that whatever it keeps while it works is still there."""


@pytest.fixture(scope="module")
def two_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server whose sampler holds two adapters."""
    folder = tmp_path_factory.mktemp("served")
    definition = folder / "small.yaml"
    definition.write_text("extends: tiny\nsampler: {max_adapters: 2}\n", "utf-8")
    with LocalServer(str(definition), folder / "data") as server:
        yield server


@pytest.fixture
def service(
    two_adapters: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], tinker.ServiceClient]]:
    """Makes service clients; their models end with the test."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    made: list[tinker.ServiceClient] = []

    def make() -> tinker.ServiceClient:
        made.append(
            tinker.ServiceClient(base_url=two_adapters.base_url, api_key=two_adapters.api_key)
        )
        return made[-1]

    yield make
    for each in made:
        each.close("success").result(timeout=LIMIT_S)


def new_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1).result(timeout=LIMIT_S)


def teach(client: tinker.TrainingClient, token: int) -> tinker.SamplingClient:
    """Have it write this token only; a client of the weights as they are then."""
    targets = {
        "target_tokens": types.TensorData.from_numpy(np.full(len(PROMPT), token)),
        "weights": types.TensorData.from_numpy(np.ones(len(PROMPT), dtype=np.float32)),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(PROMPT), loss_fn_inputs=targets)
    for _ in range(10):
        client.forward_backward([datum], "cross_entropy")
        step = client.optim_step(ADAM)
    step.result(timeout=LIMIT_S)
    return client.save_weights_and_get_sampling_client().result(timeout=LIMIT_S)


def written(sampler: tinker.SamplingClient, prompt: list[int] = PROMPT) -> list[int]:
    """The likeliest token after a prompt, as often as it was asked for."""
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), 1, greedy) for _ in range(8)]
    return [answer.result(timeout=LIMIT_S).sequences[0].tokens[0] for answer in asked]


def test_b21_four_models_that_publish_all_the_time_are_never_answered_by_each_other(service):
    def tenant(token: int) -> list[list[int]]:
        client = new_model(service())
        return [written(teach(client, token)) for _ in range(3)]

    tokens = (40, 41, 42, 43)
    with ThreadPoolExecutor(len(tokens)) as tenants:
        answers = list(tenants.map(tenant, tokens))
    assert answers == [[[token] * 8] * 3 for token in tokens]


def test_b23_the_same_prompt_after_new_weights_is_answered_by_the_new_ones(service):
    made = service()
    base = made.create_sampling_client(base_model="tiny").result(timeout=LIMIT_S)
    client, prompt = new_model(made), PROMPT * 40
    first = teach(client, 44)
    busy = base.sample(types.ModelInput.from_ints(PROMPT), 4, BUSY)
    assert written(first, prompt) == [44] * 8
    second = teach(client, 45)
    assert written(second, prompt) == [45] * 8
    assert written(first, prompt) == [44] * 8, "a client stays on the weights that it was made for"
    assert set(written(base, prompt)).isdisjoint({44, 45})
    assert len(busy.result(timeout=LIMIT_S).sequences) == 4
