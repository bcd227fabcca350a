"""The embedded sampler's numbers, against transformers and PEFT, and how it behaves under load."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
import torch
from lilo_definitions import Definition, get
from lilo_engine.errors import CommandFailed, InvalidRequest, ServerError
from lilo_engine.sampling.engine import SamplerConfig
from lilo_miles_backend.sampler import EmbeddedSampler
from lilo_miles_backend.sampler.draw import Draw, draw_tokens, stream
from safetensors.torch import load_file, save_file

from tests.sampling.conftest import embedded_engine
from tests.sampling.words import EOS, all_tokens, floats, request, tokens, with_sampler

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
async def sampler(definition, adapters, tmp_path_factory):
    """One embedded engine with all adapters."""
    async with embedded_engine(definition, tmp_path_factory.mktemp("log")) as engine:
        for name, folder in adapters.items():
            await engine.load(name, folder)
        yield engine


@asynccontextmanager
async def engine_with(definition, **changes):
    """A fresh engine of the definition with some settings of its sampler changed."""
    async with embedded_engine(with_sampler(definition, **changes), None) as engine:
        with anyio.fail_after(30):
            yield engine


@pytest.fixture(scope="module")
def peft(adapters):
    """PEFT with the same adapters."""
    from lilo_definitions import resolve_source
    from peft import PeftModel
    from transformers import Qwen3ForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = Qwen3ForCausalLM.from_pretrained(
            resolve_source(get("tiny").model.source), dtype=torch.float32
        )
        names = list(adapters)
        model = PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(adapters[name], adapter_name=name)
    return model.eval()


def expected_logprobs(model, ids: list[int], adapter: str | None = None) -> np.ndarray:
    """Log-probability of every token after the first, by one full forward pass."""
    x = torch.tensor([ids])
    with torch.no_grad():
        if adapter is not None:
            model.set_adapter(adapter)
        logits = model(x).logits
    return logits[0, :-1].log_softmax(-1).gather(-1, x[0, 1:, None])[:, 0].numpy()


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.mark.parametrize("length", [1, 7, 300, 1000])
async def test_base_logprobs_equal_a_full_forward_pass(sampler, reference, length):
    prompt = random_prompt(length, length)
    result = await sampler.sample(
        request(prompt, n=2, seed=1, max_tokens=24, temperature=1.3, prompt_logprobs=True)
    )
    for sequence in result.sequences:
        expected = expected_logprobs(reference, [*prompt, *tokens(sequence)])
        np.testing.assert_allclose(
            floats(sequence.logprobs), expected[length - 1 :], atol=TOLERANCE
        )
        np.testing.assert_allclose(
            floats(result.prompt_logprobs)[1:], expected[: length - 1], atol=TOLERANCE
        )


async def test_several_adapters_in_one_batch_each_equal_peft(sampler, adapters, peft, reference):
    names = [None, *adapters] * 2
    prompts = [random_prompt(5 + 9 * i, i) for i in range(len(names))]
    results = {}

    async def one(i):
        results[i] = await sampler.sample(
            request(
                prompts[i],
                n=2,
                adapter=names[i],
                seed=i,
                max_tokens=20,
                prompt_logprobs=True,
                request_id=f"mixed{i}",
            )
        )

    async with anyio.create_task_group() as tasks:
        for i in range(len(names)):
            tasks.start_soon(one, i)
    for i, name in enumerate(names):
        for sequence in results[i].sequences:
            ids = [*prompts[i], *tokens(sequence)]
            expected = expected_logprobs(reference if name is None else peft, ids, name)
            got = [*floats(results[i].prompt_logprobs)[1:], *floats(sequence.logprobs)]
            np.testing.assert_allclose(got, expected, atol=TOLERANCE, err_msg=str(name))


async def test_top_logprobs_equal_the_reference(sampler, reference):
    prompt = random_prompt(40, 3)
    result = await sampler.sample(request(prompt, max_tokens=1, topk_prompt=5, seed=0, topk=5))
    with torch.no_grad():
        values = reference(torch.tensor([prompt])).logits[0].log_softmax(-1).topk(5)
    top = result.topk_prompt
    ids = np.frombuffer(top.token_ids, dtype="<i4").reshape(-1, 5)
    np.testing.assert_array_equal(ids[1:], values.indices[:-1].numpy())
    np.testing.assert_allclose(
        floats(top.logprobs).reshape(-1, 5)[1:], values.values[:-1].numpy(), atol=TOLERANCE
    )
    sampled = result.sequences[0].topk
    np.testing.assert_allclose(floats(sampled.logprobs), values.values[-1].numpy(), atol=TOLERANCE)


async def test_greedy_equals_transformers_generate(sampler, reference):
    for text in ("12+34=", "7", "99-1="):
        prompt = [ord(c) for c in text]
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
        )[0, len(prompt) :].tolist()
        result = await sampler.sample(
            request(prompt, temperature=0.0, max_tokens=12, stop_tokens=(EOS,))
        )
        assert all_tokens(result) == [expected]


async def test_a_seeded_sample_does_not_depend_on_its_company(sampler):
    alone = await sampler.sample(request(seed=11, temperature=1.5, max_tokens=30, adapter="all"))
    results = []

    async def one(seed, adapter):
        result = await sampler.sample(
            request(seed=seed, temperature=1.5, max_tokens=30, adapter=adapter)
        )
        if seed == 11:
            results.append(result)

    async with anyio.create_task_group() as tasks:
        for seed in range(8, 20):
            tasks.start_soon(one, seed, "all" if seed == 11 else "head")
    assert all_tokens(results[0]) == all_tokens(alone)
    np.testing.assert_allclose(
        floats(results[0].sequences[0].logprobs),
        floats(alone.sequences[0].logprobs),
        atol=TOLERANCE,
    )


async def test_unloading_does_not_change_a_request_that_runs(sampler, adapters):
    wanted = request(adapter="passing", seed=5, n=4, max_tokens=300, temperature=1.5)
    await sampler.load("passing", adapters["all"])
    expected = all_tokens(await sampler.sample(wanted))
    answers = []

    async def long():
        answers.append(all_tokens(await sampler.sample(wanted)))

    async with anyio.create_task_group() as tasks:
        before = (await sampler.health()).generated_tokens
        tasks.start_soon(long)
        while (await sampler.health()).generated_tokens < before + 20:
            await anyio.lowlevel.checkpoint()
        await sampler.unload("passing")
        # The name stands for other weights now; the running request must not see them.
        await sampler.load("passing", adapters["mlp"])
    await sampler.unload("passing")
    assert answers == [expected]


async def test_more_samples_than_rows_run_in_waves(definition):
    async with engine_with(definition, sequences=3) as engine:
        result = await engine.sample(request([65], n=10, seed=0, temperature=2.0))
        alone = await engine.sample(request([65], seed=9, temperature=2.0))
    assert len(result.sequences) == 10
    assert all_tokens(alone) == all_tokens(result)[9:]


async def order_of_finishing(engine, first, *later):
    """Names of the requests (name, fields) as they finished; the later ones are sent once the first one runs."""
    finished = []

    async def run(name, fields):
        await engine.sample(request(request_id=name, **fields))
        finished.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, *first)
        while not (await engine.health()).running:
            await anyio.lowlevel.checkpoint()
        for one in later:
            tasks.start_soon(run, *one)
    return finished


SCORE = ("score", {"max_tokens": 1, "prompt_logprobs": True})


async def test_scoring_is_not_held_up_by_full_rows(definition):
    async with engine_with(definition, sequences=1) as engine:
        finished = await order_of_finishing(engine, ("long", {"max_tokens": 400}), SCORE)
    assert finished == ["score", "long"]


async def test_a_request_of_many_samples_leaves_rows_for_others(definition):
    many, few = ("many", {"n": 40, "max_tokens": 50}), ("few", {"n": 2, "max_tokens": 50})
    async with engine_with(definition, sequences=4) as engine:
        finished = await order_of_finishing(engine, many, few, SCORE)
    assert finished == ["score", "few", "many"]


async def test_a_long_prompt_is_computed_in_pieces_with_the_same_numbers(
    sampler, reference, monkeypatch
):
    from lilo_miles_backend.sampler import prefill

    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 100)
    prompt = random_prompt(730, 9)
    result = await sampler.sample(request(prompt, max_tokens=5, seed=0, prompt_logprobs=True))
    expected = expected_logprobs(reference, [*prompt, *all_tokens(result)[0]])
    got = [*floats(result.prompt_logprobs)[1:], *floats(result.sequences[0].logprobs)]
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)


async def test_a_stop_string_ends_the_sample_at_the_token_that_completes_it(sampler):
    greedy = {"temperature": 0.0, "max_tokens": 12}
    free = all_tokens(await sampler.sample(request(**greedy)))[0]
    assert bytes(free[:2]) == b"46"
    result = await sampler.sample(request(stop_strings=("never seen", "46"), **greedy))
    assert all_tokens(result) == [free[:2]]
    assert result.sequences[0].stop_reason == "stop"
    # The prompt ends with "=": a stop string never reaches back into it.
    result = await sampler.sample(request(stop_strings=("=4",), **greedy))
    assert all_tokens(result) == [free]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 0}, "r = 0"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "LORA"),
    ],
)
async def test_an_adapter_with_features_that_are_not_applied_is_refused(
    embedded, adapters, tmp_path, change, words
):
    folder = shutil.copytree(adapters["mlp"], tmp_path / "changed")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(InvalidRequest, match=words):
        await embedded.load("changed", str(folder))


@pytest.mark.parametrize(
    "how", ["nan", "shape", "rank", "half", "unknown", "layer", "base", "bytes"]
)
async def test_an_adapter_with_wrong_tensors_is_refused(embedded, adapters, tmp_path, how):
    folder = shutil.copytree(adapters["all"], tmp_path / "changed")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    if how == "nan":
        tensors[key][0, 0] = math.nan
    elif how == "shape":
        tensors[key] = tensors[key][:, 1:].contiguous()
    elif how == "rank":
        tensors[key] = tensors[key][1:].contiguous()
        tensors[key.replace("_A", "_B")] = tensors[key.replace("_A", "_B")][:, 1:].contiguous()
    elif how == "half":
        del tensors[key]
    elif how == "unknown":
        tensors["base_model.model.model.layers.0.mlp.router.lora_A.weight"] = torch.zeros(1, 1)
    elif how == "layer":
        tensors[key.replace("layers.0", "layers.9")] = tensors.pop(key)
    elif how == "base":
        tensors["base_model.model.model.embed_tokens.weight"] = torch.ones(260, 128)
    save_file(tensors, file)
    if how == "bytes":
        file.write_bytes(b"no safetensors")
    with pytest.raises(InvalidRequest):
        await embedded.load("changed", str(folder))
    await embedded.load("good", adapters["all"])


async def test_rank_stabilised_scale_is_applied(embedded, adapters, tmp_path):
    folder = shutil.copytree(adapters["mlp"], tmp_path / "changed")
    config = json.loads((folder / "adapter_config.json").read_text())
    # alpha / sqrt(16) with a quarter of alpha is alpha / 16.
    changed = config | {"use_rslora": True, "lora_alpha": config["lora_alpha"] / 4}
    (folder / "adapter_config.json").write_text(json.dumps(changed))
    await embedded.load("plain", adapters["mlp"])
    await embedded.load("stabilised", str(folder))
    scores = [
        floats(
            (
                await embedded.sample(request(adapter=name, max_tokens=0, prompt_logprobs=True))
            ).prompt_logprobs
        )
        for name in ("plain", "stabilised")
    ]
    np.testing.assert_allclose(scores[0][1:], scores[1][1:], atol=1e-6)


async def test_an_adapter_that_overflows_fails_its_own_requests_only(embedded, adapters, tmp_path):
    folder = shutil.copytree(adapters["all"], tmp_path / "huge")
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_" in name:
            tensor.fill_(1e30)
    save_file(tensors, folder / "adapter_model.safetensors")
    await embedded.load("huge", str(folder))
    await embedded.load("good", adapters["linears"])
    wanted = request(adapter="good", seed=1, max_tokens=60)
    expected = await embedded.sample(wanted)
    answers = []

    async def bad(i):
        with pytest.raises(CommandFailed):
            await embedded.sample(request(adapter="huge", n=3, max_tokens=40, request_id=f"b{i}"))

    async def good():
        answers.append(await embedded.sample(wanted))

    async with anyio.create_task_group() as tasks:
        for i in range(3):
            tasks.start_soon(bad, i)
            tasks.start_soon(good)
    assert [all_tokens(a) for a in answers] == [all_tokens(expected)] * 3
    assert all_tokens(await embedded.sample(wanted)) == all_tokens(expected)


async def test_no_more_adapters_than_the_definition_allows(definition, adapters):
    async with engine_with(definition, max_adapters=2) as engine:
        await engine.load("a", adapters["mlp"])
        await engine.load("b", adapters["mlp"])
        with pytest.raises(ServerError):
            await engine.load("c", adapters["mlp"])
        await engine.unload("a")
        await engine.load("c", adapters["mlp"])


def test_a_definition_that_disagrees_with_its_model_is_refused(definition: Definition):
    wrong = definition.model_copy(
        update={"model": definition.model.model_copy(update={"vocab_size": 300})}
    )
    with pytest.raises(ValueError, match="300"):
        EmbeddedSampler(SamplerConfig(definition=wrong))


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    for temperature, top_k, top_p in [
        (1.0, -1, 1.0),
        (0.5, -1, 1.0),
        (1.0, 2, 1.0),
        (1.0, -1, 0.8),
    ]:
        draws = [
            Draw(temperature=temperature, top_k=top_k, top_p=top_p, stream=stream(0, j))
            for j in range(len(logits))
        ]
        got = np.bincount(draw_tokens(logits, draws), minlength=4) / len(logits)
        expected = torch.softmax(logits[0].double() / temperature, -1).numpy()
        # 0.8 needs the two most likely tokens: 0.644 alone falls short of it.
        if top_k == 2 or top_p == 0.8:
            expected[[0, 3]] = 0
        np.testing.assert_allclose(got, expected / expected.sum(), atol=0.015)


def test_a_very_low_temperature_is_greedy_and_finite():
    logits = torch.tensor([[5.0, 80.0, 79.0], [3.0, -1.0, 2.0]])
    draws = [Draw(temperature=1e-12, top_k=-1, top_p=1.0, stream=stream(0, j)) for j in range(2)]
    assert draw_tokens(logits, draws) == [1, 0]
