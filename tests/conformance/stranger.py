"""A stranger: a client with a key of its own, and every call of the SDK by which it could name another's thing.

Used by `test_tenants.py`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import tinker
from tinker import types

from tests.conformance.conftest import STRANGERS_KEY
from tests.conformance.test_ten_facts import ADAM, example, trainer

LIMIT_S = 20
SAMPLER_ID = re.compile(r"[0-9a-f-]{36}:sample:\d+")
SESSION = "00000000-0000-4000-8000-000000000000"
"""Of nobody."""


@dataclass(frozen=True)
class Things:
    """What one client has, by its ids."""

    session_id: str
    run_id: str
    state: str
    """Paths of checkpoints."""
    weights: str
    external: str
    sampler_id: str
    pass_id: str
    """Request ids."""
    sample_id: str


NOTHING = Things(
    session_id=SESSION,
    run_id=f"{SESSION}:train:0",
    state=f"tinker://{SESSION}:train:0/weights/mine",
    weights=f"tinker://{SESSION}:train:0/sampler_weights/mine",
    external=f"tinker://{SESSION}:train:0/external_weights/mine",
    sampler_id=f"{SESSION}:sample:2",
    pass_id=f"{SESSION}:train:0:1",
    sample_id=f"sample:{SESSION}:sample:2:0",
)


def sampler_id_in(handle: str) -> str:
    return SAMPLER_ID.search(base64.urlsafe_b64decode(handle).decode()).group()


@dataclass(frozen=True)
class Stranger:
    """Another key's client, with a model of its own."""

    service: tinker.ServiceClient
    client: tinker.TrainingClient
    rest: tinker.RestClient
    http: httpx.Client
    key: str = STRANGERS_KEY

    def as_if_its(self, run_id: str) -> tinker.TrainingClient:
        """A training client whose calls name this model."""
        forged = trainer(self.service)
        forged.model_id = run_id
        return forged

    def sampler(self, sampler_id: str) -> tinker.SamplingClient:
        """A sampling client whose calls name this sampling session."""
        own = self.service.create_sampling_client(base_model="tiny").result(timeout=LIMIT_S)
        fields = base64.urlsafe_b64decode(own.get_sampler_handle()).decode()
        handle = base64.urlsafe_b64encode(SAMPLER_ID.sub(sampler_id, fields).encode()).decode()
        return tinker.SamplingClient.from_sampler_handle(handle, api_key=self.key)


Call = Callable[[Stranger, Things], object]
DATA = [example([1, 2, 3])]
SDK: dict[str, Call] = {
    "ServiceClient.copy_weights": lambda s, t: s.service.copy_weights(t.state),
    "ServiceClient.create_sampling_client": lambda s, t: s.service.create_sampling_client(
        model_path=t.weights
    ),
    "ServiceClient.create_training_client_from_state": lambda s, t: (
        s.service.create_training_client_from_state(t.state)
    ),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda s, t: (
        s.service.create_training_client_from_state_with_optimizer(t.state)
    ),
    "TrainingClient.create_sampling_client": lambda s, t: s.client.create_sampling_client(
        t.weights
    ),
    "TrainingClient.load_state": lambda s, t: s.client.load_state(t.state),
    "TrainingClient.load_state_with_optimizer": lambda s, t: s.client.load_state_with_optimizer(
        t.state
    ),
    "SamplingClient.from_sampler_handle": lambda s, t: s.sampler(t.sampler_id).sample(
        types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)
    ),
    "RestClient.assign_session_project": lambda s, t: s.rest.assign_session_project(
        t.session_id, "p"
    ),
    "RestClient.copy_weights": lambda s, t: s.rest.copy_weights(t.state, "elsewhere"),
    "RestClient.delete_checkpoint": lambda s, t: s.rest.delete_checkpoint(t.run_id, "weights/mine"),
    "RestClient.delete_checkpoint_from_tinker_path": lambda s, t: (
        s.rest.delete_checkpoint_from_tinker_path(t.weights)
    ),
    "RestClient.export_session_trace": lambda s, t: s.rest.export_session_trace(t.session_id),
    "RestClient.get_external_weights_urls": lambda s, t: s.rest.get_external_weights_urls(
        t.external
    ),
    "RestClient.get_sampler": lambda s, t: s.rest.get_sampler(t.sampler_id),
    "RestClient.get_session": lambda s, t: s.rest.get_session(t.session_id),
    "RestClient.get_training_run": lambda s, t: s.rest.get_training_run(t.run_id),
    "RestClient.get_training_run_by_tinker_path": lambda s, t: (
        s.rest.get_training_run_by_tinker_path(t.state)
    ),
    "RestClient.get_weights_info_by_tinker_path": lambda s, t: (
        s.rest.get_weights_info_by_tinker_path(t.state)
    ),
    "RestClient.list_checkpoints": lambda s, t: s.rest.list_checkpoints(t.run_id),
    "RestClient.publish_checkpoint_from_tinker_path": lambda s, t: (
        s.rest.publish_checkpoint_from_tinker_path(t.state)
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda s, t: (
        s.rest.set_checkpoint_ttl_from_tinker_path(t.state, 3600)
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda s, t: (
        s.rest.unpublish_checkpoint_from_tinker_path(t.state)
    ),
}
"""Every public method that takes an id or a path."""
FORGED: dict[str, Call] = {
    "forward": lambda s, t: s.as_if_its(t.run_id).forward(DATA, "cross_entropy"),
    "forward_backward": lambda s, t: s.as_if_its(t.run_id).forward_backward(DATA, "cross_entropy"),
    "optim_step": lambda s, t: s.as_if_its(t.run_id).optim_step(ADAM),
    "save_state": lambda s, t: s.as_if_its(t.run_id).save_state("theirs"),
    "save_weights_external": lambda s, t: s.as_if_its(t.run_id).save_weights_external("theirs"),
    "save_weights_for_sampler": lambda s, t: s.as_if_its(t.run_id).save_weights_for_sampler(
        "theirs"
    ),
    "compute_logprobs": lambda s, t: s.sampler(t.sampler_id).compute_logprobs(
        types.ModelInput.from_ints([1, 2])
    ),
}
"""Methods of a client that was made to believe that another's model or sampler is its own."""
