"""The embedded sampler's numbers for every family, against transformers and PEFT."""

from __future__ import annotations

import warnings

import anyio
import numpy as np
import pytest
import torch

from tests.miles_backend.random_families import write_model
from tests.sampling.conftest import embedded_engine
from tests.sampling.families import FAMILIES, make_adapter, make_model, random_text
from tests.sampling.test_embedded import expected_logprobs
from tests.sampling.words import all_tokens, floats, request, tokens

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")]

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
async def small(request, tmp_path_factory):
    """(sampler, the model in transformers, the same with adapters "one" and "two" in PEFT)."""
    from peft import PeftModel

    family = request.param
    folder = tmp_path_factory.mktemp("family")
    model = make_model(family, folder / "model")
    adapters = {
        name: make_adapter(model, family, folder / name, rank, rank)
        for name, rank in (("one", 4), ("two", 2))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(model, adapters["one"], adapter_name="one")
        peft.load_adapter(adapters["two"], adapter_name="two")
    async with embedded_engine(write_model(folder / "model", family), folder) as engine:
        for name, path in adapters.items():
            await engine.load(name, path)
        yield engine, peft.eval()


def expected(peft, ids, adapter):
    if adapter is not None:
        return expected_logprobs(peft, ids, adapter)
    with peft.disable_adapter():
        return expected_logprobs(peft, ids)


async def test_samples_of_several_adapters_in_one_batch_equal_transformers(small):
    sampler, peft = small
    names = [None, "one", "two", "one"]
    prompts = [random_text(length, length) for length in (1, 3, 90, 41)]
    results = {}

    async def one(i):
        # Three samples share one prefill, and prompts of different lengths are prefilled together.
        results[i] = await sampler.sample(
            request(
                prompts[i],
                n=3,
                adapter=names[i],
                seed=i,
                max_tokens=20,
                prompt_logprobs=True,
                request_id=f"small{i}",
            )
        )

    async with anyio.create_task_group() as tasks:
        for i in range(len(names)):
            tasks.start_soon(one, i)
    assert len({tuple(ids) for result in results.values() for ids in all_tokens(result)}) > 8
    for i, name in enumerate(names):
        for sequence in results[i].sequences:
            ids = [*prompts[i], *tokens(sequence)]
            got = [*floats(results[i].prompt_logprobs)[1:], *floats(sequence.logprobs)]
            np.testing.assert_allclose(
                got, expected(peft, ids, name), atol=TOLERANCE, err_msg=str(name)
            )


async def test_adapters_side_by_side_make_what_they_make_alone(small):
    from lilo_miles_backend.sampler.adapters import Adapter
    from lilo_miles_backend.sampler.model import Model

    sampler, _ = small
    held = sampler._adapters
    one, two = held["one"], held["two"]
    base = sampler._base
    rows = [None, one, two, one]
    tokens_BT = torch.tensor([random_text(9, seed) for seed in range(4)])
    found = []
    with torch.inference_mode():
        for stacks in (False, True):
            model = Model(base, stacks=stacks)
            for subset in ([one, None], rows, [two, one]):
                text = tokens_BT[: len(subset)]
                cache = model.new_cache(max_rows=4, max_length=9)
                hidden = model.forward(text, [0] * len(subset), [9] * len(subset), cache, subset)
                found.append(model.logits(hidden[:, -1], subset))
    for apart, together in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    # One whose products overflow breaks its own rows only.
    huge = Adapter("huge", "", {place: (a * 1e38, b) for place, (a, b) in one.factors.items()})
    model = Model(base, stacks=True)
    with torch.inference_mode():
        cache = model.new_cache(max_rows=3, max_length=9)
        hidden = model.forward(tokens_BT[1:], [0] * 3, [9] * 3, cache, [one, huge, one])
    assert not hidden[1].isfinite().all()
    torch.testing.assert_close(
        model.logits(hidden[:1, -1], [one]), found[1][1:2], rtol=0, atol=1e-5
    )


async def test_a_prompt_in_pieces_and_rows_that_end_early_give_the_same_numbers(small, monkeypatch):
    sampler, peft = small
    from lilo_miles_backend.sampler import prefill

    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 77)
    prompt = random_text(200, 5)
    answers = {}

    async def one(name, count):
        answers[name] = await sampler.sample(
            request(prompt, n=2, seed=count, max_tokens=count, adapter="two", request_id=name)
        )

    async with anyio.create_task_group() as tasks:
        # The short ones end first, and the longer ones move into their rows of the cache.
        for name, count in (("short", 3), ("middle", 9), ("long", 24)):
            tasks.start_soon(one, name, count)
    for name in ("middle", "long"):
        for sequence in answers[name].sequences:
            wanted = expected(peft, [*prompt, *tokens(sequence)], "two")[len(prompt) - 1 :]
            np.testing.assert_allclose(floats(sequence.logprobs), wanted, atol=TOLERANCE)


async def test_an_adapter_of_another_family_is_refused_by_module(small, tmp_path):
    from lilo_engine.errors import InvalidRequest
    from safetensors.torch import save_file

    sampler, _ = small
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.zeros(2, 48), name.format("B"): torch.zeros(8, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    with pytest.raises(InvalidRequest, match="qkv_proj"):
        await sampler.load("foreign", str(tmp_path))
