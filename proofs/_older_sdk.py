"""One life with the SDK of this interpreter, for `older_sdks.py`; not a proof: prints one JSON object.

Trains, passes forward only, saves, samples, restores with and without optimizer, as clients of every version do.
"""

import json
import sys
from typing import Any

import tinker
from tinker import types


def wait(value: Any) -> Any:
    """What a call gives, whether the SDK returns it, a future of it, or a future of a future."""
    while hasattr(value, "result"):
        value = value.result(timeout=120)
    return value


def example(tokens):
    targets = tokens[1:]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(
                data=[1.0] * len(targets), dtype="float32", shape=[len(targets)]
            ),
        },
    )


service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = wait(service.create_lora_training_client(base_model="tiny", rank=4, seed=1))
batch = [example([1, 50, 60, 70]), example([9, 8, 7])]
adam = types.AdamParams(learning_rate=1e-2)


def scores(who):
    passed = wait(who.forward(batch, "cross_entropy"))
    return [[float(v) for v in output["logprobs"].tolist()] for output in passed.loss_fn_outputs]


for _ in range(2):
    wait(client.forward_backward(batch, "cross_entropy"))
    wait(client.optim_step(adam))
path = wait(client.save_state("kept")).path
live = scores(client)
sampler = wait(client.save_weights_and_get_sampling_client("snapshot"))
params = types.SamplingParams(max_tokens=4, seed=1, temperature=1.0)
sampled = wait(
    sampler.sample(types.ModelInput.from_ints([1, 2]), num_samples=2, sampling_params=params)
)
warm = wait(service.create_training_client_from_state_with_optimizer(path))
cold = wait(service.create_training_client_from_state(path))
print(
    json.dumps(
        {
            "version": tinker.__version__,
            "sequences": len(sampled.sequences),
            "warm": scores(warm) == live,
            "cold": scores(cold) == live,
        }
    )
)
