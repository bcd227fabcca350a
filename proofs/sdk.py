"""The unmodified `tinker` SDK trains, saves, resumes, samples, lists and deletes against `lilo serve tiny`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker
import torch
from _losses import CONFIG, expected_loss, inputs_of
from _proof import (
    Proof,
    adam,
    connect,
    datum,
    largest_difference,
    logprobs,
    step,
    tiny_server,
    tokens,
)
from lilo_engine.demo.server import LocalServer
from tinker import types

DATA = [datum(tokens(index, 20 + 7 * index)) for index in range(4)]
EOS = 257
"""The tiny model's end of text."""


def main() -> None:
    """Every part on one server; a part that raises is one failed figure."""
    proof = Proof("sdk")
    parts = (
        creation,
        forward_and_losses,
        custom_loss,
        pipelined,
        chunked,
        interleaved,
        resumed,
        sampled,
        trainer_and_sampler_agree,
    )
    with tiny_server() as server, connect(server) as service:
        for part in parts:
            with proof.part(part.__name__):
                part(proof, service)
        with proof.part("rest"):
            rest(proof, service, server)
    proof.end()


def new_client(
    service: tinker.ServiceClient, seed: int = 1, **options: Any
) -> tinker.TrainingClient:
    """A client with a seed, so that two of them are equal."""
    return service.create_lora_training_client("tiny", rank=8, seed=seed, **options).result()


def creation(proof: Proof, service: tinker.ServiceClient) -> None:
    """Capabilities, the default flags, the information of a model, its tokenizer."""
    names = [model.model_name for model in service.get_server_capabilities().supported_models]
    proof.figure("supported models", names, "has tiny", "tiny" in names)
    client = service.create_lora_training_client("tiny").result()
    info = client.get_info()
    proof.equal("default LoRA rank", info.lora_rank, 32)
    proof.equal("model name", info.model_data.model_name, "tiny")
    ids = client.get_tokenizer().encode("12+7=")
    proof.equal("the tokenizer reads bytes", ids, list(b"12+7="))


def forward_and_losses(proof: Proof, service: tinker.ServiceClient) -> None:
    """Forward leaves gradients alone; each loss equals its formula, computed here in float64."""
    client = new_client(service)
    step(client, DATA)
    rows = logprobs(client, DATA)
    proof.equal(
        "forward: lengths", [len(row) for row in rows], [d.model_input.length for d in DATA]
    )
    for name in CONFIG:
        columns = [inputs_of(name, row) for row in rows]
        data = [
            datum(
                [*d.model_input.to_ints(), d.loss_fn_inputs["target_tokens"].tolist()[-1]], **column
            )
            for d, column in zip(DATA, columns, strict=True)
        ]
        config = CONFIG[name] or None
        output = client.forward_backward(data, name, config).result()
        wanted = sum(
            expected_loss(name, np.array(row), column)
            for row, column in zip(rows, columns, strict=True)
        )
        relative = abs(output.metrics["loss:sum"] - wanted) / max(1.0, abs(wanted))
        proof.at_most(f"{name}: |loss - formula| / |formula|", relative, 1e-4)
        trained = [record["logprobs"].tolist() for record in output.loss_fn_outputs]
        proof.at_most(f"{name}: logprobs against forward", largest_difference(trained, rows), 1e-5)
        client.optim_step(adam(0.0)).result()


def custom_loss(proof: Proof, service: tinker.ServiceClient) -> None:
    """forward_backward_custom with cross entropy written in torch moves the weights as the built-in does."""
    built_in, custom = new_client(service, 2), new_client(service, 2)

    def cross_entropy(data: list[types.Datum], rows: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = -torch.cat(rows).sum()
        return loss, {"mine": float(loss.detach())}

    loss = step(built_in, DATA)
    output = custom.forward_backward_custom(DATA, cross_entropy).result()
    custom.optim_step(adam()).result()
    proof.at_most("custom: |loss - built in|", abs(output.metrics["mine"] - loss), 1e-3)
    worst = largest_difference(logprobs(built_in, DATA), logprobs(custom, DATA))
    proof.at_most("custom: logprobs after the step against built in", worst, 1e-5)


def pipelined(proof: Proof, service: tinker.ServiceClient) -> None:
    """Ten steps sent without waiting equal ten awaited steps."""
    sent, awaited = new_client(service, 3), new_client(service, 3)
    futures: list[Any] = []
    for index in range(10):
        futures.append(sent.forward_backward([DATA[index % 4]], "cross_entropy"))
        futures.append(sent.optim_step(adam()))
    for future in futures:
        future.result()
    for index in range(10):
        step(awaited, [DATA[index % 4]])
    worst = largest_difference(logprobs(sent, DATA), logprobs(awaited, DATA))
    proof.at_most("pipelined against awaited, 10 steps", worst, 1e-6)


def chunked(proof: Proof, service: tinker.ServiceClient) -> None:
    """More data than fit one message (the SDK cuts at 1,024): all come back, in order, with one sum of losses."""
    client = new_client(service, 4)
    many = [datum(tokens(index, 5 + index % 3)) for index in range(1500)]
    output = client.forward_backward(many, "cross_entropy").result()
    client.optim_step(adam(0.0)).result()
    rows = [record["logprobs"].tolist() for record in output.loss_fn_outputs]
    pieces = [
        row for start in range(0, 1500, 500) for row in logprobs(client, many[start : start + 500])
    ]
    proof.equal("chunked: outputs", len(rows), 1500)
    proof.at_most(
        "chunked: logprobs against smaller batches", largest_difference(rows, pieces), 1e-5
    )
    total = -sum(map(sum, pieces))
    relative = abs(output.metrics["loss:sum"] - total) / total
    proof.at_most("chunked: |loss - sum| / sum", relative, 1e-5)


def interleaved(proof: Proof, service: tinker.ServiceClient) -> None:
    """Two clients whose calls are mixed end where each alone ends."""
    alone = [new_client(service, seed) for seed in (5, 6)]
    for client, data in zip(alone, (DATA[:2], DATA[2:]), strict=True):
        for _ in range(4):
            step(client, data)
    together = [new_client(service, seed) for seed in (5, 6)]
    futures: list[Any] = []
    for _ in range(4):
        for client, data in zip(together, (DATA[:2], DATA[2:]), strict=True):
            futures.append(client.forward_backward(data, "cross_entropy"))
            futures.append(client.optim_step(adam()))
    for future in futures:
        future.result()
    for index in (0, 1):
        worst = largest_difference(logprobs(alone[index], DATA), logprobs(together[index], DATA))
        proof.at_most(f"interleaved client {index} against alone", worst, 1e-6)


def resumed(proof: Proof, service: tinker.ServiceClient) -> None:
    """A new client from saved state, with its optimizer, goes on as if nothing had happened."""
    live = new_client(service, 7)
    for _ in range(3):
        step(live, DATA)
    path = live.save_state("resume").result().path
    warm = service.create_training_client_from_state_with_optimizer(path).result()
    cold = service.create_training_client_from_state(path).result()
    in_place = new_client(service, 8)
    in_place.load_state_with_optimizer(path).result()
    losses = {
        name: [step(client, DATA) / 160 for _ in range(3)]
        for name, client in (("live", live), ("warm", warm), ("cold", cold), ("in place", in_place))
    }
    for name in ("warm", "in place"):
        worst = max(abs(a - b) for a, b in zip(losses["live"], losses[name], strict=True))
        proof.at_most(f"next losses per token, {name} against live", worst, 1e-6)
    first = abs(losses["live"][0] - losses["cold"][0])
    proof.at_most("without the optimizer: first loss equal", first, 1e-6)
    later = abs(losses["live"][2] - losses["cold"][2])
    proof.at_least("without the optimizer: third loss differs", later, 1e-5)


def sampled(proof: Proof, service: tinker.ServiceClient) -> None:
    """Named sampler weights, the base model; seeds, stops, n, lengths, logprobs."""
    client = new_client(service, 9)
    step(client, DATA)
    path = client.save_weights_for_sampler("named").result().path
    sampler = service.create_sampling_client(model_path=path)
    sampler = sampler.result() if hasattr(sampler, "result") else sampler

    def ask(**options: Any) -> list[types.SampledSequence]:
        count = options.pop("n", 1)
        params = types.SamplingParams(
            **{"max_tokens": 16, "temperature": 1.0, "stop": []} | options
        )
        prompt = types.ModelInput.from_ints(list(b"12+7="))
        return list(sampler.sample(prompt, count, params).result().sequences)

    four = ask(n=4, seed=11)
    proof.equal("n = 4", len(four), 4)
    proof.at_least("different sequences of one request", len({tuple(s.tokens) for s in four}), 2)
    again = ask(n=4, seed=11)
    same = [s.tokens for s in four] == [s.tokens for s in again]
    proof.equal("the same seed gives the same tokens", same, True)
    other = [s.tokens for s in ask(n=4, seed=12)] != [s.tokens for s in four]
    proof.equal("another seed gives others", other, True)
    proof.equal("no stop: runs to max_tokens", [len(s.tokens) for s in four], [16] * 4)
    proof.equal("no stop: reason", sorted({s.stop_reason for s in four}), ["length"])
    target = four[0].tokens[3]
    (stopped,) = ask(seed=11, stop=[target])
    first = four[0].tokens.index(target)
    proof.equal("a stop token ends and is included", stopped.tokens, four[0].tokens[: first + 1])
    proof.equal("a stop token: reason", stopped.stop_reason, "stop")
    ends = [s for s in ask(n=32, seed=5, stop=None, max_tokens=24) if s.stop_reason == "stop"]
    good = bool(ends) and all(s.tokens[-1] == EOS for s in ends)
    proof.figure("absent stop: the model's own end", len(ends), "> 0, each ends with 257", good)
    (worded,) = ask(seed=11, stop=[bytes(four[0].tokens[:2]).decode("latin-1")])
    proof.equal("a stop string ends", worded.stop_reason, "stop")
    proof.equal("logprobs of every token", len(four[0].logprobs or []), 16)
    base = service.create_sampling_client(base_model="tiny")
    base = base.result() if hasattr(base, "result") else base
    prompt = types.ModelInput.from_ints(list(b"1+1="))
    count = len(base.sample(prompt, 3, types.SamplingParams(max_tokens=4)).result().sequences)
    proof.equal("the base model samples", count, 3)


def trainer_and_sampler_agree(proof: Proof, service: tinker.ServiceClient) -> None:
    """compute_logprobs and sampled logprobs against the trainer's forward, after steps that moved the weights."""
    client = new_client(service, 10)
    for _ in range(3):
        step(client, DATA)
    sampler = client.save_weights_and_get_sampling_client().result()
    trained = logprobs(client, DATA)
    scored: list[list[float]] = []
    for one in DATA:
        ids = [*one.model_input.to_ints(), one.loss_fn_inputs["target_tokens"].tolist()[-1]]
        told = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
        # The first token has nothing before it.
        scored.append([x for x in told[1:] if x is not None])
    proof.at_most("compute_logprobs against forward", largest_difference(scored, trained), 1e-4)
    prompt = tokens(3, 12)
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=3, stop=[])
    response = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result()
    said = [list(sequence.logprobs or ()) for sequence in response.sequences]
    rows = logprobs(client, [datum([*prompt, *s.tokens]) for s in response.sequences])
    worst = largest_difference(said, [row[len(prompt) - 1 :] for row in rows])
    proof.at_most("sampled logprobs against forward", worst, 1e-4)
    step(client, DATA)
    again = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result()
    same = [s.tokens for s in again.sequences] == [s.tokens for s in response.sequences]
    proof.equal("a snapshot stays as it was while training goes on", same, True)


def rest(proof: Proof, service: tinker.ServiceClient, server: LocalServer) -> None:
    """Runs and checkpoints: list, get, delete."""
    client = new_client(service, 11, user_metadata={"who": "proof"})
    step(client, DATA)
    state = client.save_state("listed", user_metadata={"step": "1"}).result().path
    adapter = client.save_weights_for_sampler("listed").result().path
    run = state.removeprefix("tinker://").split("/")[0]
    client_of = tinker.RestClient(base_url=server.base_url, api_key=server.api_key)
    runs = [
        entry.training_run_id for entry in client_of.list_training_runs().result().training_runs
    ]
    proof.figure("runs listed", len(runs), f"has {run}", run in runs)
    one = client_of.get_training_run(run).result()
    proof.equal("run: base model, rank", [one.base_model, one.lora_rank], ["tiny", 8])
    info = client_of.get_weights_info_by_tinker_path(state).result()
    proof.equal("weights_info: base model, rank", [info.base_model, info.lora_rank], ["tiny", 8])
    listed = client_of.list_checkpoints(run).result().checkpoints
    found = sorted(checkpoint.tinker_path for checkpoint in listed)
    proof.equal("checkpoints of the run", found, sorted([state, adapter]))
    sizes = all((checkpoint.size_bytes or 0) > 0 for checkpoint in listed)
    proof.equal("checkpoints have sizes", sizes, True)
    client_of.delete_checkpoint_from_tinker_path(state).result()
    left = [
        checkpoint.tinker_path
        for checkpoint in client_of.list_checkpoints(run).result().checkpoints
    ]
    proof.equal("after deleting the training state", left, [adapter])
    try:
        service.create_training_client_from_state_with_optimizer(state).result()
        said = None
    except tinker.TinkerError as error:
        said = str(error)
    proof.figure("loading what was deleted", said, "an error", said is not None)


if __name__ == "__main__":
    main()
