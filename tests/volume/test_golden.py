"""Checkpoints of every released format stay readable, byte for byte. `tests/golden/volume/make.py` made them."""

import shutil
from pathlib import Path

import pytest
from lilo_volume import LocalVolume, catalogue, latest, open_named, survey
from lilo_volume.manifest import FORMAT, parse

GOLDEN = Path(__file__).parents[1] / "golden" / "volume"
FORMATS = [int(path.name.removeprefix("format-")) for path in sorted(GOLDEN.glob("format-*"))]


def test_a_checkpoint_of_every_format_is_kept():
    assert set(FORMATS) == set(range(1, FORMAT + 1))


@pytest.fixture(params=FORMATS)
def golden(request, tmp_path):
    # A copy: reading must not need to write, but a failing test might.
    shutil.copytree(GOLDEN / f"format-{request.param}", tmp_path / "volume")
    return LocalVolume(tmp_path / "volume")


def test_it_is_opened_by_name_and_every_byte_is_verified(golden):
    found = open_named(golden, "run:Train/0", "weights", "Step 18 \u00e9", verify="full")
    assert found.publication.order == 18
    assert (found.folder / "model/part.bin").read_bytes() == bytes(range(256))
    assert found.manifest.metadata["note"] == 'quotes " and \u2014'
    assert found.manifest.layout == {"tp": 1}
    assert [entry.path for entry in found.manifest.files] == ["empty", "model/part.bin"]


def test_the_newest_of_several_ranks_is_the_latest(golden):
    found = latest(golden, "run:Train/0", "weights", verify="full").checkpoint
    assert found is not None
    assert found.publication.name == "x" * 300
    assert [receipt.files for receipt in found.manifest.receipts] == [
        ("__0_0.distcp",),
        (),
        ("__2_0.distcp",),
    ]
    assert {receipt.node for receipt in found.manifest.receipts} == {"golden-node"}


def test_its_manifest_is_written_back_as_the_same_bytes(golden):
    for checkpoint in catalogue(golden):
        data = (checkpoint.folder / "manifest.json").read_bytes()
        assert parse(data).to_bytes() == data
    assert survey(golden).leftovers == ()
