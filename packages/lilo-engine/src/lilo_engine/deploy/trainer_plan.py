"""The plan of the trainer's function: every field of a definition that its containers are made from."""

from __future__ import annotations

from collections.abc import Mapping

from lilo_definitions import Definition, canonical_json

from lilo_engine.config import KERNEL_CACHE_SWITCHES, KERNEL_CACHE_VARIABLES
from lilo_engine.deploy import places
from lilo_engine.deploy.function_plan import (
    FunctionPlan,
    ImagePlan,
    Mount,
    backend_package,
    engine_packages,
)
from lilo_engine.errors import InvalidRequest

RETRIES = 3
"""Of a trainer call that failed: it goes on from the newest verified state, so that another try loses little."""


def trainer_plan(definition: Definition, app: str, wheels: str | None, python: str) -> FunctionPlan:
    """The function whose containers train and serve one run.

    Raises:
        InvalidRequest: one volume would be mounted at two places.
    """
    topology, rented, limits = definition.topology, definition.deployment, definition.limits
    mounts = [
        Mount(path=places.MODELS_MOUNT, volume=rented.models_volume, read_only=True),
        Mount(path=places.CHECKPOINTS_MOUNT, volume=rented.checkpoints_volume),
        Mount(path=places.BULLETIN_MOUNT, volume=rented.bulletin_volume),
    ]
    if rented.kernel_cache_volume is not None:
        mounts.append(Mount(path=places.KERNELS_MOUNT, volume=rented.kernel_cache_volume))
    _check_distinct(definition, mounts)
    return FunctionPlan(
        name="trainer",
        body="trainer",
        image=ImagePlan(
            base=None,
            python=python,
            packages=(),
            ours=(*engine_packages("modal"), backend_package()),
            wheels=wheels,
        ),
        gpu=topology.gpu,
        num_gpus=topology.gpus_per_node,
        cpus=rented.cpus_per_node,
        memory_mib=rented.memory_gib_per_node * 1024,
        timeout_s=round(rented.trainer_timeout_hours * 3600),
        # The body starts the trainer and waits for it; the container itself only imports the engine.
        startup_timeout_s=round(limits.startup_timeout_s),
        retries=RETRIES,
        single_use_containers=rented.single_use_containers,
        mounts=tuple(mounts),
        secrets=rented.secrets,
        environment=_environment(definition, app),
        cluster_size=topology.nodes,
        rdma=topology.rdma,
    )


def _check_distinct(definition: Definition, mounts: list[Mount]) -> None:
    names = [mount.volume for mount in mounts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(
            f"definition {definition.name!r} cannot be deployed: the volume {twice[0]!r} would be mounted at two "
            "places of one container; give each of models, checkpoints, bulletin and kernel cache its own"
        )


def _environment(definition: Definition, app: str) -> Mapping[str, str]:
    rented = definition.deployment
    environment = {
        places.APP: app,
        places.DEFINITION: canonical_json(definition).decode("ascii"),
        places.DATA_DIR: places.DATA_FOLDER,
        places.MODELS: places.MODELS_MOUNT,
        places.CHECKPOINT_VOLUME: rented.checkpoints_volume,
        places.CHECKPOINT_ROOT: f"{places.CHECKPOINTS_MOUNT}/{places.STATES_FOLDER}",
        places.BULLETIN_VOLUME: rented.bulletin_volume,
        places.BULLETIN_ROOT: places.BULLETIN_MOUNT,
    }
    if rented.kernel_cache_volume is not None:
        environment |= {
            name: f"{places.KERNELS_MOUNT}/{name.lower()}" for name in KERNEL_CACHE_VARIABLES
        }
        environment |= dict.fromkeys(KERNEL_CACHE_SWITCHES, "1")
    return environment
