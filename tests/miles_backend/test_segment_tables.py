"""What the adapters' kernels are told: tiles that stay inside an adapter, tables that follow its buffers."""

from __future__ import annotations

import torch
from lilo_miles_backend.ranks.kernels.choose import kernels_of
from lilo_miles_backend.ranks.kernels.reference import REFERENCE
from lilo_miles_backend.ranks.kernels.segment_tables import (
    CHUNK,
    make_columns,
    make_table,
    make_tiles,
    table_key,
)
from lilo_miles_backend.ranks.lora import Factors, Segment

CPU = torch.device("cpu")


def _segment(lora_rank: int) -> Segment:
    a, b = torch.zeros(lora_rank, 16), torch.zeros(16, lora_rank)
    factors = Factors(
        scale=0.1,
        lora_rank=lora_rank,
        a=a,
        b=b,
        grad_a=torch.zeros_like(a),
        grad_b=torch.zeros_like(b),
    )
    return Segment(factors=factors, tokens=slice(None))


def test_tiles_cover_each_segment_and_cross_none() -> None:
    ranges = [(0, 0), (0, 1), (1, 2 * CHUNK + 6), (2 * CHUNK + 6, 2 * CHUNK + 70)]
    tiles = make_tiles(ranges, range(4), (64, 128), CPU)
    for lines in (*tiles.pieces.values(), tiles.chunks):
        for index, (first, end) in enumerate(ranges):
            covered = [
                token
                for owner, begin, stop in lines.tolist()
                if owner == index
                for token in range(begin, stop)
            ]
            assert covered == list(range(first, end))
    assert tiles.first_chunk.tolist() == [0, 0, 1, 4, 5]
    assert tiles.most_chunks == 3


def test_segments_of_one_adapter_have_one_line_whose_chunks_lie_together() -> None:
    one, other = _segment(8), _segment(8)
    lines, owners = table_key([one, other, one])
    assert [line[0] for line in lines] == [one.factors.a.data_ptr(), other.factors.a.data_ptr()]
    ranges = [(0, 70), (70, 90), (90, 100 + CHUNK)]
    tiles = make_tiles(ranges, owners, (64,), CPU)
    # One program adds what is between two entries of `first_chunk` to one gradient.
    assert tiles.first_chunk.tolist() == [0, 3, 4]
    assert tiles.chunks.tolist() == [
        [0, 0, 70],
        [0, 90, 90 + CHUNK],
        [0, 90 + CHUNK, 100 + CHUNK],
        [1, 70, 90],
    ]
    assert tiles.most_chunks == 3


def test_columns_stay_inside_a_module() -> None:
    columns = make_columns((130, 16), 128, CPU)
    assert columns.blocks.tolist() == [[0, 0, 128], [0, 128, 130], [1, 130, 146]]
    assert columns.bounds.tolist() == [0, 130, 146]
    assert columns.divisor == 1


def test_a_table_knows_each_adapter_and_what_all_have_in_common() -> None:
    segments = [_segment(8), _segment(32)]
    table = make_table(table_key(segments)[0], CPU)
    assert table.widest_rank == 32
    assert not table.equal_ranks
    assert table.rank_divisor == 8
    assert table.lines[1, 0].item() == segments[1].factors.a.data_ptr()
    bits = table.lines[:, 5].to(torch.int32).view(torch.float32)
    assert torch.equal(bits, torch.full((2,), 0.1))


def test_buffers_that_moved_make_another_table() -> None:
    segment = _segment(8)
    assert table_key([segment]) == table_key([segment])
    assert table_key([segment]) != table_key([_segment(8)])


def test_a_cpu_computes_with_torch_alone() -> None:
    assert kernels_of(CPU) is REFERENCE
