"""A volume, and a short way to publish to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest
from lilo_volume import Checkpoint, LocalVolume, SoloGroup, Volume, begin


class Publish(Protocol):
    def __call__(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        order: int = 0,
        overwrite: bool = False,
        collection: str = "run:train:0",
        volume: Volume | None = None,
    ) -> Checkpoint: ...


@pytest.fixture
def volume(tmp_path: Path) -> LocalVolume:
    return LocalVolume(tmp_path / "volume")


@pytest.fixture
def publish(volume: LocalVolume) -> Publish:
    def run(name, files, *, order=0, overwrite=False, collection="run:train:0", volume=volume):
        attempt = begin(
            volume,
            SoloGroup(),
            collection=collection,
            kind="weights",
            name=name,
            order=order,
            overwrite=overwrite,
        )
        for path, data in files.items():
            with attempt.create(path) as file:
                file.write(data)
        return attempt.publish(expected=files.keys(), metadata={"name": name})

    return run
