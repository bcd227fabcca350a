"""Load: a published training checkpoint back as an AdapterState, or an error that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lilo_engine.errors import CommandFailed, InvalidRequest
from lilo_engine.operations.reference import CheckpointRef
from lilo_volume import Volume, open_named

from lilo_miles_backend.adapter_state import AdapterState
from lilo_miles_backend.checkpoints.dcp_reader import load_tensors, parse_metadata, shapes_of
from lilo_miles_backend.checkpoints.dcp_writer import METADATA_NAME, expected_files
from lilo_miles_backend.checkpoints.document import DOCUMENT_NAME, CheckpointDocument
from lilo_miles_backend.checkpoints.training import PARTS
from lilo_miles_backend.checkpoints.translate import volume_errors


def load_training(
    volume: Volume, ref: CheckpointRef, *, with_optimizer: bool = True
) -> AdapterState:
    """Read the checkpoint `ref`; every file is compared with its digest first.

    Without the optimizer, moments are zeros and `optimizer_step` is 0.

    Raises:
        InvalidRequest: it is a sampler snapshot, which cannot be trained on.
        NotFound: there is no such checkpoint; the message lists those there are.
        CommandFailed: it is damaged; the message says where.
    """
    if ref.kind != "weights":
        raise InvalidRequest(
            f"{ref} holds a snapshot for sampling; expected tinker://RUN/weights/NAME, which save_state writes"
        )
    with volume_errors():
        checkpoint = open_named(volume, ref.run_id, ref.kind, ref.name, verify="full")
        folder, label = checkpoint.folder, str(ref)
        sizes = {entry.path: entry.size_bytes for entry in checkpoint.manifest.files}
        if missing := sorted({METADATA_NAME, DOCUMENT_NAME} - sizes.keys()):
            raise CommandFailed(
                f"{label} is no training checkpoint of an adapter: it has no {missing[0]}"
            )
        document = CheckpointDocument.parse((folder / DOCUMENT_NAME).read_bytes(), label)
        found = parse_metadata((folder / METADATA_NAME).read_bytes(), label, sizes)
        _check_files(label, expected_files(found) | {DOCUMENT_NAME}, sizes.keys())
        names = _checked_names(label, document, shapes_of(found))
        wanted = PARTS if with_optimizer else PARTS[:1]
        tensors = load_tensors(folder, found, [f"{part}.{n}" for part in wanted for n in names])
    parts = {
        part: {
            name: tensors[f"{part}.{name}"]
            if part in wanted
            else torch.zeros_like(tensors[f"weights.{name}"])
            for name in names
        }
        for part in PARTS
    }
    return AdapterState(
        base_model=document.base_model,
        spec=document.spec,
        optimizer_step=document.optimizer_step if with_optimizer else 0,
        **parts,
    )


def _check_files(label: str, expected: set[str], have: Iterable[str]) -> None:
    if different := sorted(expected ^ set(have)):
        raise CommandFailed(f"{label}: .metadata and manifest differ in {', '.join(different[:3])}")


def _checked_names(
    label: str, document: CheckpointDocument, shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    """Names of the adapter's tensors, sorted: the order in the file depends on how many ranks wrote it.

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
    for name in names:
        axis = 0 if name.endswith(".lora_A") else -1
        if len(shapes[f"weights.{name}"]) != 2 or shapes[f"weights.{name}"][axis] != rank:
            raise CommandFailed(
                f"{label}: {name} is {list(shapes[f'weights.{name}'])}, {DOCUMENT_NAME} says rank {rank}"
            )
    return names
