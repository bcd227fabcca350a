"""The plan of the sampling pool's function: every field of a definition that its replicas are made from."""

from __future__ import annotations

import json

from lilo_definitions import Definition, Pool

from lilo_engine.deploy import places, pool
from lilo_engine.deploy.function_plan import FunctionPlan, ImagePlan, Mount, engine_packages

BASE_IMAGE = "nvidia/cuda:12.9.1-devel-ubuntu24.04"
"""With the compiler that sampling engines build kernels with."""
LONGEST_LIFE_S = 24 * 3600
"""The provider's longest life of a container."""
CPUS, MEMORY_MIB = 8.0, 65_536
"""Of a replica: tokenless HTTP and scheduling, and adapters that wait in host memory."""


def sampler_plan(
    definition: Definition, replicas: Pool, wheels: str | None, python: str
) -> FunctionPlan:
    """The function whose containers are the replicas of an external sampling engine."""
    rented, most = definition.deployment, definition.sampler.sequences
    folder = f"{places.MODELS_MOUNT}/{definition.model.source.removeprefix('hf:')}"
    command = pool.command_of(definition, replicas, folder)
    return FunctionPlan(
        name="sampler",
        body="sampler",
        image=ImagePlan(
            base=BASE_IMAGE,
            python=python,
            packages=(pool.package_of(definition),),
            ours=engine_packages(),
            wheels=wheels,
        ),
        gpu=replicas.gpu,
        num_gpus=replicas.gpus_per_replica,
        cpus=CPUS,
        memory_mib=MEMORY_MIB,
        timeout_s=LONGEST_LIFE_S,
        startup_timeout_s=replicas.startup_timeout_s,
        retries=0,
        single_use_containers=False,
        mounts=(
            Mount(path=places.MODELS_MOUNT, volume=rented.models_volume, read_only=True),
            Mount(path=places.BULLETIN_MOUNT, volume=rented.bulletin_volume, read_only=True),
        ),
        secrets=rented.secrets,
        environment={
            places.SAMPLER_COMMAND: json.dumps(command),
            **pool.environment_of(definition),
        },
        min_containers=replicas.min_replicas,
        max_containers=replicas.max_replicas,
        scaledown_s=replicas.scale_down_s,
        target_inputs=replicas.target_sequences,
        max_inputs=most + replicas.max_queued,
        port=places.SAMPLER_PORT,
    )
