"""Places: where things lie in a container, and the names of the variables that say so. Read by both ends.

`deployment.py` writes these variables into what it plans; `surroundings.py` reads them in the container.
"""

from __future__ import annotations

MODELS_MOUNT = "/lilo/models"
CHECKPOINTS_MOUNT = "/lilo/checkpoints"
BULLETIN_MOUNT = "/lilo/bulletin"
KERNELS_MOUNT = "/lilo/kernels"
DATA_FOLDER = "/lilo/data"
"""Records and logs, on the container's own disk; records are snapshotted to the checkpoint volume."""

STATES_FOLDER = "states"
"""In the checkpoint volume: what training and sampling publish."""
RECORDS_FOLDER = "records"
"""In the checkpoint volume: snapshots of the records. A root of its own, so that it is no run's checkpoint."""

DEFINITION = "LILO_DEFINITION"
"""The whole definition as canonical JSON: every field reaches the container, whatever is installed there."""
APP = "LILO_APP"
"""Name of the app, by which a run calls its next container."""
DATA_DIR = "LILO_DATA_DIR"
MODELS = "LILO_MODELS"
"""Read by `lilo_definitions.resolve_source`."""
CHECKPOINT_VOLUME = "LILO_CHECKPOINT_VOLUME"
CHECKPOINT_ROOT = "LILO_CHECKPOINT_ROOT"
BULLETIN_VOLUME = "LILO_BULLETIN_VOLUME"
BULLETIN_ROOT = "LILO_BULLETIN_ROOT"
SAMPLER_COMMAND = "LILO_SAMPLER_COMMAND"
"""The command of one replica, as a JSON list."""

FRONT_PORT = 8010
SAMPLER_PORT = 8000
