"""Where compiled kernels are kept."""

from pathlib import Path

import pytest
from lilo_engine.config import (
    KERNEL_CACHE_SWITCHES,
    KERNEL_CACHE_VARIABLES,
    RAY_ADDRESS_VARIABLE,
    DataFolder,
    environment_of_children,
    keep_kernels,
)


def test_kernels_are_kept_in_the_data_folder_unless_another_place_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, *others = KERNEL_CACHE_VARIABLES
    monkeypatch.delenv(RAY_ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv(told, "/elsewhere")
    for name in (*others, *KERNEL_CACHE_SWITCHES):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    keep_kernels(DataFolder(root=Path("data")))
    children = environment_of_children()
    assert children[told] == "/elsewhere"
    assert [children[name] for name in KERNEL_CACHE_SWITCHES] == ["1"]
    places = {children[name] for name in others}
    assert len(places) == len(others)
    assert all(place.startswith(str(tmp_path / "data" / "kernels")) for place in places)


def test_a_cluster_keeps_kernels_where_its_machines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RAY_ADDRESS_VARIABLE, "head:6379")
    for name in KERNEL_CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    keep_kernels(DataFolder(root=tmp_path))
    assert not set(KERNEL_CACHE_VARIABLES) & environment_of_children().keys()
