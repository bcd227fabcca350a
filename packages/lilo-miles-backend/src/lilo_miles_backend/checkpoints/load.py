"""Load: a published training checkpoint back as an AdapterState, or an error that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_engine.operations.operation import LoraSpec
from lilo_engine.operations.reference import CheckpointRef
from lilo_volume import Checkpoint, Group, SoloGroup, Volume, open_named

from lilo_miles_backend.adapter_state import PARTS, AdapterState
from lilo_miles_backend.checkpoints.dcp_reader import load_tensors, parse_metadata, shapes_of
from lilo_miles_backend.checkpoints.dcp_writer import METADATA_NAME, expected_files
from lilo_miles_backend.checkpoints.document import DOCUMENT_NAME, CheckpointDocument
from lilo_miles_backend.checkpoints.outcome import done_alike
from lilo_miles_backend.checkpoints.publication import TIMEOUT_S
from lilo_miles_backend.checkpoints.translate import volume_errors
from lilo_miles_backend.shards import FactorShard

Place: TypeAlias = Callable[
    [str, LoraSpec, Mapping[str, tuple[int, int]]], Mapping[str, FactorShard]
]
"""Which part of each tensor a rank wants, by base model, shape of the adapter and whole shapes by name. It raises
InvalidRequest when the checkpoint is not one of the rank's model; the same on every rank."""


def load_training(
    volume: Volume,
    ref: CheckpointRef,
    *,
    with_optimizer: bool = True,
    group: Group | None = None,
    place: Place | None = None,
    timeout_s: float = TIMEOUT_S,
    node: str | None = None,
) -> AdapterState:
    """Read this rank's part of the checkpoint `ref`; every file is compared with its digest first, by rank 0 for all.

    Called by every rank of `group`, None: one rank; `node` is as in `publication.publish`. Without `place` everything is read. Without the optimizer, moments
    are zeros and `optimizer_step` is 0.

    Raises:
        InvalidRequest: it is a sampler snapshot, which cannot be trained on, or `place` refuses it.
        NotFound: there is no such checkpoint; the message lists those there are.
        CommandFailed: it is damaged; the message says where.
        PeerFailed: a rank did not come, or failed for a reason that is no user's.
    """
    if ref.kind != "weights":
        raise InvalidRequest(
            f"{ref} holds a snapshot for sampling; expected tinker://RUN/weights/NAME, which save_state writes"
        )
    ranks = group or SoloGroup()
    with volume_errors():
        checkpoint = open_named(
            volume,
            ref.run_id,
            ref.kind,
            ref.name,
            verify="full",
            group=ranks,
            timeout_s=timeout_s,
            node=node,
        )

        def read() -> AdapterState:
            with volume_errors():
                return _read(checkpoint, str(ref), with_optimizer=with_optimizer, place=place)

        return done_alike(ranks, read, step=f"read {ref}", timeout_s=timeout_s)


def _read(
    checkpoint: Checkpoint, label: str, *, with_optimizer: bool, place: Place | None
) -> AdapterState:
    """What this rank wants of a checkpoint that is in its view."""
    folder = checkpoint.folder
    sizes = {entry.path: entry.size_bytes for entry in checkpoint.manifest.files}
    if missing := sorted({METADATA_NAME, DOCUMENT_NAME} - sizes.keys()):
        raise CommandFailed(
            f"{label} is no training checkpoint of an adapter: it has no {missing[0]}"
        )
    document = CheckpointDocument.parse((folder / DOCUMENT_NAME).read_bytes(), label)
    found = parse_metadata((folder / METADATA_NAME).read_bytes(), label, sizes)
    _check_files(label, expected_files(found) | {DOCUMENT_NAME}, sizes.keys())
    shapes = _checked_shapes(label, document, shapes_of(found))
    shards = (
        {name: FactorShard(full=full) for name, full in shapes.items()}
        if place is None
        else place(document.base_model, document.spec, shapes)
    )
    wanted = PARTS if with_optimizer else PARTS[:1]
    tensors = load_tensors(
        folder, found, {f"{part}.{name}": s for part in wanted for name, s in shards.items()}
    )
    parts = {
        part: {
            name: tensors[f"{part}.{name}"]
            if part in wanted
            else torch.zeros_like(tensors[f"weights.{name}"])
            for name in shards
        }
        for part in PARTS
    }
    return AdapterState(
        base_model=document.base_model,
        spec=document.spec,
        optimizer_step=document.optimizer_step if with_optimizer else 0,
        shards={name: shard for name, shard in shards.items() if shard.dim is not None},
        **parts,
    )


def _check_files(label: str, expected: set[str], have: Iterable[str]) -> None:
    if different := sorted(expected ^ set(have)):
        raise CommandFailed(f"{label}: .metadata and manifest differ in {', '.join(different[:3])}")


def _checked_shapes(
    label: str, document: CheckpointDocument, shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, int]]:
    """Whole shapes of the adapter's tensors by name, sorted: the order in the file depends on how many ranks wrote it.

    Raises:
        CommandFailed: parts differ, or a tensor does not have the rank that the document says.
    """
    names = sorted(key.removeprefix("weights.") for key in shapes if key.startswith("weights."))
    for part in PARTS:
        for name in names:
            if shapes.get(f"{part}.{name}") != shapes[f"weights.{name}"]:
                raise CommandFailed(f"{label}: {part} of {name} is missing or of another shape")
    if not names or len(shapes) != len(names) * len(PARTS):
        raise CommandFailed(
            f"{label} holds {len(shapes)} tensors, which are not {PARTS} of one adapter"
        )
    rank = document.lora.lora_rank
    checked: dict[str, tuple[int, int]] = {}
    for name in names:
        shape = shapes[f"weights.{name}"]
        if len(shape) != 2 or shape[0 if name.endswith(".lora_A") else 1] != rank:
            raise CommandFailed(
                f"{label}: {name} is {list(shape)}, {DOCUMENT_NAME} says rank {rank}"
            )
        checked[name] = shape[0], shape[1]
    return checked
