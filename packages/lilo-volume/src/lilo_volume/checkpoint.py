"""Checkpoint: a published state as its readers see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lilo_volume.manifest import Manifest, attempt_folder
from lilo_volume.publication import Publication
from lilo_volume.volume import Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A published state; its folder never changes while it exists."""

    publication: Publication
    manifest: Manifest
    folder: Path
    """In this container's view. May hold stray files; only those of the manifest belong to the checkpoint."""
    size_bytes: int

    @property
    def label(self) -> str:
        """Collection, kind and name, for messages."""
        return label_of(self.publication)

    @classmethod
    def of(cls, volume: Volume, manifest: Manifest) -> Checkpoint:
        """The checkpoint that `manifest` stands for."""
        return cls(
            publication=manifest.publication,
            manifest=manifest,
            folder=volume.local_path(attempt_folder(manifest.publication)),
            size_bytes=manifest.size_bytes,
        )


def label_of(publication: Publication) -> str:
    """Collection, kind and name, for messages."""
    return f"{publication.collection}/{publication.kind}/{publication.name}"
