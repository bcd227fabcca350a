"""DCP writer: state dicts as torch distributed checkpoint files inside an attempt, digested while written.

The files are those of `torch.distributed.checkpoint`: `__<rank>_<n>.distcp` and `.metadata`, which its own loader
reads. The planning is torch's too; its `save` is not called, because it needs a torch process group for more than
one rank, warns for one, and raises a BaseException. What it does is done here over a lilo-volume `Group`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from lilo_volume import (
    Attempt,
    DigestingFile,
    Group,
    PublishRefused,
    decided_by_rank_zero,
    done_by_every_rank,
)
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] - the reader's record of a file slice
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.utils.serialization import config as save_settings

from lilo_miles_backend.adapter_state import uncovered
from lilo_miles_backend.checkpoints.planners import ShardSavePlanner
from lilo_miles_backend.shards import FactorShard

METADATA_NAME = ".metadata"
_SMALL_BYTES = 4096


class AttemptWriter(StorageWriter):
    """Writes one file per rank into an attempt."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        """Write as `rank`."""
        super().__init__()
        self._attempt = attempt
        self._rank = rank

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between saves: a writer is made for one attempt."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing to set up: the attempt has its folder."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are: file names come from the rank."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; a rank without any leaves no file."""
        written: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            name = f"__{self._rank}_0{DEFAULT_SUFFIX}"
            with self._attempt.create(name) as file:
                for item in plan.items:
                    start = file.tell()
                    length = _write_item(planner, item, file)
                    info = _StorageInfo(name, start, length)
                    results.append(WriteResult(item.index, length, info))
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`; it says which slice of which file holds what."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        metadata.storage_meta = self.storage_meta()
        with self._attempt.create(METADATA_NAME) as file:
            file.write(pickle.dumps(metadata))

    def storage_meta(self) -> StorageMeta:
        """Empty: a checkpoint does not say where it was written."""
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Only folders."""
        return isinstance(checkpoint_id, Path)


def save_state_dict(
    attempt: Attempt,
    group: Group,
    state: Mapping[str, torch.Tensor],
    shards: Mapping[str, FactorShard],
) -> set[str] | None:
    """Write `state` (2-D tensors by name, what this rank holds of each) into `attempt`; replicas are written once.

    `shards` says which part each is, and on rank 0 also names those that only others hold: all of them must be there.

    Returns on rank 0 the files that were written over all ranks, None on others.

    Raises:
        VolumeError: a rank could not plan or write, or no rank holds some part; the same on every rank.
    """
    limits = {"label": attempt.label, "node": attempt.node, "timeout_s": attempt.timeout_s}
    planner = ShardSavePlanner(shards)
    writer = AttemptWriter(attempt, group.rank)
    metadata: list[Metadata] = []
    wanted = {name: (tensor.shape[0], tensor.shape[1]) for name, tensor in state.items()}
    wanted |= {name: shard.full for name, shard in shards.items()}

    def plan() -> SavePlan:
        planner.set_up_planner(dict(state), writer.storage_meta(), group.rank == 0)
        return planner.create_local_plan()

    def share_out() -> list[SavePlan]:
        check_covered(attempt.label, plans, wanted)
        central, found = planner.create_global_plan(plans)
        metadata.append(found)
        return central

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(central[group.rank]), planner).wait()

    plans = done_by_every_rank(group, plan, step="plan checkpoint", **limits)
    central = decided_by_rank_zero(group, share_out, step="share plan", **limits)
    results = done_by_every_rank(group, write, step="write shards", **limits)
    if not metadata:
        return None
    writer.finish(metadata[0], results)
    return expected_files(metadata[0])


def check_covered(
    label: str, plans: Sequence[SavePlan], wanted: Mapping[str, tuple[int, int]]
) -> None:
    """Refuse plans of all ranks that leave out some part of a tensor; `wanted` has whole shapes by name.

    Raises:
        PublishRefused: names the tensors, what there is of each, and how many ranks told of it.
    """
    if not wanted:
        raise PublishRefused(f"checkpoint {label!r}: the adapter has no tensors; nothing to save")
    held: dict[str, list[FactorShard]] = {name: [] for name in wanted}
    for item in (item for plan in plans for item in plan.items):
        assert item.tensor_data is not None, "only tensors are planned"
        held.setdefault(item.index.fqn, []).append(_shard_of(item.tensor_data))
    missing = [
        text
        for name, parts in held.items()
        if (text := uncovered(name, wanted[name] if name in wanted else parts[0].full, parts))
    ]
    if missing:
        raise PublishRefused(
            f"checkpoint {label!r} is short of {len(missing)} of {len(held)} tensors over {len(plans)} ranks: "
            f"{'; '.join(missing[:3])}; nothing was published"
        )


def _shard_of(data: TensorWriteData) -> FactorShard:
    """The part that an item writes; `uncovered` needs no more than where it begins and how large it is."""
    (rows, columns), (top, left) = data.size, data.chunk.offsets
    if data.chunk.sizes == data.size:
        return FactorShard(full=(rows, columns))
    dim = 0 if data.chunk.sizes[1] == columns else 1
    start = (top, left)[dim]
    return FactorShard(
        full=(rows, columns), dim=dim, ranges=((start, start + data.chunk.sizes[dim]),)
    )


def expected_files(metadata: Metadata) -> set[str]:
    """The files that a checkpoint with this `.metadata` has, itself included."""
    infos = cast("dict[object, _StorageInfo]", metadata.storage_data)
    return {info.relative_path for info in infos.values()} | {METADATA_NAME}


def _write_item(planner: SavePlanner, item: WriteItem, file: DigestingFile) -> int:
    """Append one item as torch's own writer makes it; the number of its bytes.

    Straight into the file, and without checksums of zip records, which no reader of these looks at: a buffer in between
    and the checksums are made with the interpreter held, which the thread that trains waits for. The file is digested.
    """
    data, start = planner.resolve_data(item), file.tell()
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO), "torch resolves byte items to BytesIO"
        return file.write(data.getvalue())
    assert isinstance(data, torch.Tensor), "torch resolves all other items to tensors"
    data = data.detach().cpu()
    if data.untyped_storage().nbytes() != data.numel() * data.element_size():
        data = data.clone()  # of a view, torch would save the whole storage
    out = _Out(file)
    try:
        with cast(Any, save_settings).patch("save.compute_crc32", False):
            torch.save(data, cast(IO[bytes], out))
    except RuntimeError:
        # What torch says when it cannot write to a file is not what the file said.
        if out.error is not None:
            raise out.error from None
        raise
    return file.tell() - start


class _Out:
    """A file as `torch.save` wants one, which remembers why it could not be written to.

    The dozens of bytes of zip records are put together here: a call of the file for each would take longer than all
    the rest.
    """

    def __init__(self, file: DigestingFile) -> None:
        self._file = file
        self._small = bytearray()
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        """Append."""
        if len(data) < _SMALL_BYTES:
            self._small += data
        else:
            self.flush()
            self._put(data)
        return len(data)

    def flush(self) -> None:
        """Hand over what was put together."""
        small, self._small = self._small, bytearray()
        self._put(small)

    def _put(self, data: memoryview | bytearray) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
