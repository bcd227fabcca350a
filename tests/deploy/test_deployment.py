"""What would be created for a definition, as data."""

import dataclasses
import json

import lilo_definitions
import pytest
from lilo_definitions import GPUS, Definition
from lilo_engine.config import KERNEL_CACHE_VARIABLES
from lilo_engine.deploy import places, plan
from lilo_engine.deploy.surroundings import Surroundings
from lilo_engine.errors import InvalidRequest
from pydantic import ValidationError

from tests.deploy.fields import changed, fields_of

BIG = "qwen3_8_27b_miles_lora_256k"
BASE = {name: lilo_definitions.get(name) for name in (BIG, "tiny")}
CASES = [
    pytest.param(name, path, value, id=f"{name}-{'.'.join(path)}")
    for name, definition in BASE.items()
    for path, value in fields_of(definition)
]
RESOURCES = {"topology", "sampler", "deployment"}
"""Parts whose fields say what is rented."""


@pytest.mark.parametrize("name", lilo_definitions.names())
def test_every_installed_definition_can_be_planned(name):
    planned = plan(lilo_definitions.get(name))
    assert planned.definition == name
    assert planned.cost.trainer_usd > 0


@pytest.mark.parametrize(("name", "path", "value"), CASES)
def test_a_changed_field_reaches_the_containers_or_is_refused(name, path, value):
    base = BASE[name]
    refusal = None
    try:
        other = base.derive(**changed(path, value))
        planned = plan(other)
    except (ValidationError, InvalidRequest) as error:
        refusal = str(error)
    if refusal is not None:
        assert path[0] in refusal or path[-1] in refusal
        return
    assert planned != plan(base)
    assert planned.digest != plan(base).digest
    assert Surroundings.of(planned.trainer.environment).definition == other


def test_a_field_that_says_what_is_rented_changes_what_is_rented():
    base = BASE[BIG]
    # What these say is for the ranks, and reaches them with the definition.
    for_ranks = {"tp", "cp", "dp", "align_sequences_to_parallel_layout", "ephemeral_versions"}
    for path, value in fields_of(base):
        if path[0] not in RESOURCES or path[-1] in for_ranks:
            continue
        try:
            planned = plan(base.derive(**changed(path, value)))
        except (ValidationError, InvalidRequest):
            continue
        assert _rented(planned) != _rented(plan(base)), ".".join(path)


def _rented(planned):
    environment = {k: v for k, v in planned.trainer.environment.items() if k != places.DEFINITION}
    trainer = dataclasses.replace(planned.trainer, environment=environment)
    return trainer, planned.sampler, planned.cost


def test_the_256k_definition_takes_two_hosts_of_eight_and_two_replicas_of_four():
    planned = plan(BASE[BIG])
    trainer, sampler = planned.trainer, planned.sampler
    assert (trainer.cluster_size, trainer.rdma, trainer.gpu_text) == (2, True, "H200:8")
    assert trainer.timeout_s == 24 * 3600
    assert trainer.single_use_containers
    assert sampler is not None
    assert (sampler.gpu_text, sampler.min_containers, sampler.max_containers) == ("H200:4", 2, 2)
    gpus = (2 * 8 + 2 * 4) * GPUS["H200"].usd_per_hour
    assert gpus < planned.cost.least_usd < gpus * 1.1


def test_what_the_ranks_need_is_handed_over_by_name():
    rented = BASE[BIG].deployment
    given = plan(BASE[BIG]).trainer.environment
    assert given["LILO_CHECKPOINT_VOLUME"] == rented.checkpoints_volume
    assert given["LILO_BULLETIN_VOLUME"] == rented.bulletin_volume
    assert given["LILO_BULLETIN_ROOT"].startswith("/")
    with_cache = plan(BASE[BIG].derive(deployment={"kernel_cache_volume": "kernels"})).trainer
    (mount,) = (mount for mount in with_cache.mounts if mount.volume == "kernels")
    assert all(
        with_cache.environment[name].startswith(mount.path) for name in KERNEL_CACHE_VARIABLES
    )


def test_a_replica_is_started_with_what_the_definition_says():
    definition = BASE[BIG]
    for engine in ("sglang", "vllm"):
        planned = plan(definition.derive(sampler={"engine": engine}))
        command = json.loads(planned.sampler.environment[places.SAMPLER_COMMAND])
        assert any(engine in word for word in command[:3])
        for value in (
            definition.context,
            definition.lora.max_rank,
            definition.sampler.sequences,
            definition.sampler.max_adapters,
            definition.sampler.pool.adapters_per_batch,
            definition.sampler.pool.memory_fraction,
        ):
            assert str(value) in command


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topology": {"gpu": None}}, "topology.gpu"),
        ({"model": {"source": "/home/me/model"}}, "model.source"),
        (
            {"topology": {"nodes": 4, "gpus_per_node": 4}},
            "topology.gpus_per_node",
        ),
        ({"deployment": {"bulletin_volume": "lilo-models"}}, "lilo-models"),
    ],
)
def test_what_the_provider_cannot_give_is_refused_by_name(changes, field):
    with pytest.raises(InvalidRequest, match=field):
        plan(BASE[BIG].derive(**changes))


def test_a_cluster_without_gpus_is_refused():
    tiny: Definition = BASE["tiny"]
    with pytest.raises(InvalidRequest, match=r"topology\.nodes"):
        plan(tiny.derive(topology={"nodes": 2, "dp": 2}))


def test_a_python_that_images_cannot_have_is_refused_with_those_they_can():
    with pytest.raises(InvalidRequest, match=r"'9'.*3\.12"):
        plan(BASE["tiny"], python="9")
