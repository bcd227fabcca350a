"""Training checkpoints: adapter and optimizer as torch distributed checkpoint shards, and `checkpoint.json`.

Names in the shards are slot-free: `weights.`, `exp_avg.` or `exp_avg_sq.` before the adapter's own name, so that
any layout and any slot can load them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from lilo_engine.commands.command import Destination, Published
from lilo_engine.errors import CommandFailed
from lilo_volume import Attempt, Group, Volume

from lilo_miles_backend.adapter_state import PARTS, AdapterState, flat_tensors
from lilo_miles_backend.checkpoints.dcp_writer import save_state_dict
from lilo_miles_backend.checkpoints.document import DOCUMENT_NAME, CheckpointDocument
from lilo_miles_backend.checkpoints.outcome import done_alike
from lilo_miles_backend.checkpoints.publication import ONE_RANK, publish
from lilo_miles_backend.shards import FactorShard


def persist_training(
    volume: Volume,
    group: Group,
    state: AdapterState,
    destination: Destination,
    *,
    layout: Mapping[str, int] = ONE_RANK,
    node: str | None = None,
) -> Published:
    """Publish everything needed to go on training an adapter; called by every rank of `group` with what it holds.

    `node` is as in `publication.publish`.

    Raises:
        InvalidRequest: the name is taken and `destination.overwrite` is not set.
        CommandFailed: the state is not whole, or it could not be published; nothing of it is visible.
    """

    def write(attempt: Attempt) -> set[str] | None:
        check = functools.partial(_check_whole, state)
        done_alike(group, check, step="check the state", timeout_s=attempt.timeout_s)
        files = save_state_dict(attempt, group, flat_tensors(state), _shards(state))
        if files is None:
            return None
        with attempt.create(DOCUMENT_NAME) as file:
            document = CheckpointDocument.of(state, dict(layout))
            file.write(document.model_dump_json(indent=1).encode())
        return files | {DOCUMENT_NAME}

    return publish(volume, group, state, destination, layout=layout, write=write, node=node)


def _shards(state: AdapterState) -> dict[str, FactorShard]:
    return {f"{part}.{name}": shard for part in PARTS for name, shard in state.shards.items()}


def _check_whole(state: AdapterState) -> None:
    """Refuse moments that do not belong to the weights.

    Whether all ranks together have everything is checked when the writing is planned (`dcp_writer.check_covered`).
    """
    for part in PARTS[1:]:
        moments: Mapping[str, object] = getattr(state, part)
        if different := sorted(state.weights.keys() ^ moments.keys()):
            raise CommandFailed(f"{part} and weights differ in {', '.join(different[:3])}")
        for name, tensor in state.weights.items():
            shape = list(getattr(state, part)[name].shape)
            if shape != list(tensor.shape):
                raise CommandFailed(
                    f"{part} of {name} is {shape}, the weights are {list(tensor.shape)}"
                )
