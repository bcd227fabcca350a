"""Two keys of one `lilo serve tiny`: every method of the SDK that names a thing, tried by a stranger with another's thing.

What is another's must look exactly as what is not there, and must be as it was afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import httpx
import tinker
from _proof import LIMIT_S, Proof, connect, datum, largest_difference, logprobs, step, tiny_server
from lilo_engine.demo.server import LocalServer
from tinker import types

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.conformance.test_tenants import (
    FORGED,
    NOTHING,
    RAW,
    SDK,
    Stranger,
    Things,
    outcome,
    sampler_id_in,
)

warnings.filterwarnings("ignore", "DEPRECATED", FutureWarning)
DATA = [datum([33, 60, 47, 51])]


def main() -> None:
    """An owner trains, saves and samples; a stranger tries everything."""
    proof = Proof("tenants")
    with tiny_server() as server:
        key = another_key(server)
        with (
            connect(server) as owner,
            tinker.ServiceClient(
                base_url=server.base_url, api_key=key, project_id="elsewhere"
            ) as other,
            httpx.Client(
                base_url=server.base_url, headers={"X-API-Key": key}, timeout=LIMIT_S
            ) as http,
        ):
            client = owner.create_lora_training_client("tiny", rank=4).result(timeout=LIMIT_S)
            step(client, DATA)
            before = logprobs(client, DATA)
            things = things_of(owner, client)
            rest = tinker.RestClient(base_url=server.base_url, api_key=key)
            own = other.create_lora_training_client("tiny", rank=4).result(timeout=LIMIT_S)
            try_everything(proof, Stranger(other, own, rest, http, key), things)
            after = logprobs(client, DATA)
            proof.equal("change of the owner's model", largest_difference(before, after), 0.0)
            again = owner.create_training_client_from_state(things.state).result(timeout=LIMIT_S)
            saved = largest_difference(before, logprobs(again, DATA))
            proof.at_most("change of the owner's checkpoint", saved, 1e-6)
    proof.end()


def another_key(server: LocalServer) -> str:
    """Made at the command line, while the server runs."""
    lilo = [sys.executable, "-c", "from lilo_engine.cli import main; main()"]
    command = [*lilo, "keys", "create", "stranger", "--data-dir", str(server.data_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def things_of(owner: tinker.ServiceClient, client: tinker.TrainingClient) -> Things:
    """What the owner has, by its ids."""
    run_id = client.get_info().model_id
    sampler = client.save_weights_and_get_sampling_client()
    if hasattr(sampler, "result"):
        sampler = sampler.result(timeout=LIMIT_S)
    sampler.sample(
        types.ModelInput.from_ints([33]), 1, types.SamplingParams(max_tokens=2, seed=1)
    ).result(timeout=LIMIT_S)
    sampler_id = sampler_id_in(sampler.get_sampler_handle())
    return Things(
        session_id=run_id.split(":")[0],
        run_id=run_id,
        state=client.save_state("mine").result(timeout=LIMIT_S).path,
        weights=client.save_weights_for_sampler("mine").result(timeout=LIMIT_S).path,
        external=client.save_weights_external("mine").result(timeout=LIMIT_S).path,
        sampler_id=sampler_id,
        pass_id=f"{run_id}:1",
        sample_id=f"sample:{sampler_id}:0",
    )


def try_everything(proof: Proof, stranger: Stranger, things: Things) -> None:
    """Methods of the SDK, then calls that it does not make."""
    told: list[str] = []
    for name, call in {**SDK, **FORGED}.items():
        theirs, nobodys = outcome(call, stranger, things), outcome(call, stranger, NOTHING)
        if theirs != nobodys or theirs[0] is not tinker.NotFoundError:
            told.append(name)
    proof.at_least("methods of the SDK tried", len({**SDK, **FORGED}), 30)
    proof.equal("methods that tell another's thing from none", told, [])
    answers = {
        name: [
            (
                answer.status_code,
                answer.text.replace(each.sampler_id, "NAME").replace(each.session_id, "NAME"),
            )
            for each in (things, NOTHING)
            for answer in [stranger.http.post(f"/api/v1/{name}", json=body(each))]
        ]
        for name, body in RAW.items()
    }
    wrong = [name for name, (one, two) in answers.items() if one[0] != 404 or one != two]
    proof.equal(f"of {len(RAW)} raw calls, those that tell", wrong, [])


if __name__ == "__main__":
    main()
