"""Send: the manifest goes into a commit of its own, and what became of it is looked up, not believed."""

from __future__ import annotations

import time

from lilo_volume.checkpoint import label_of
from lilo_volume.errors import FileMissing, OutcomeUnknown, PublishRefused, VolumeError
from lilo_volume.files import write_durably
from lilo_volume.log import warn
from lilo_volume.manifest import MANIFEST_NAME, attempt_folder
from lilo_volume.publication import Publication
from lilo_volume.steps import FIRST_DELAY_S, TRIES, Steps
from lilo_volume.volume import Volume


def send_manifest(volume: Volume, publication: Publication, data: bytes, steps: Steps) -> None:
    """Write the manifest and commit it; returns once it is in the committed state.

    Raises:
        PublishRefused: the volume refused it each time; it is not there.
        OutcomeUnknown: the volume will not say.
    """
    path = f"{attempt_folder(publication)}/{MANIFEST_NAME}"
    place = volume.local_path(path)
    last: Exception | None = None
    for number in range(TRIES):
        if number:
            time.sleep(FIRST_DELAY_S)
        try:
            with steps.named("manifest"):
                write_durably(place, data)
            with steps.named("commit manifest"):
                volume.commit()
        except (VolumeError, OSError) as error:
            # Whoever commits on this node, also in the background, may have published it.
            if _arrived(volume, publication, path, data, error):
                warn("commit of %s raised after it was applied: %s", path, error)
                return
            last = error
        else:
            return
    place.unlink(missing_ok=True)  # or a later commit of anything else would publish it after all
    assert last is not None, "every try failed"
    if _arrived(volume, publication, path, data, last):
        return
    raise PublishRefused(
        f"checkpoint {label_of(publication)!r}: the volume refused the manifest {TRIES} times "
        f"(last: {last}); nothing was published"
    ) from last


def _arrived(
    volume: Volume, publication: Publication, path: str, data: bytes, cause: Exception
) -> bool:
    """Whether the manifest is in the committed state."""
    last: VolumeError | None = None
    for number in range(TRIES):
        if number:
            time.sleep(FIRST_DELAY_S)
        try:
            return volume.read_committed(path) == data
        except FileMissing:
            return False
        except VolumeError as error:
            last = error
    raise OutcomeUnknown(
        f"checkpoint {label_of(publication)!r}: commit raised ({cause}), and reading back did too "
        f"({last}); begin again with retry=True, which publishes nothing twice"
    ) from last
