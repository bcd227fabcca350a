"""The `lilo-volume` command: look at volumes, keep them in order, move checkpoints, from a shell.

Exit codes: 0 good, 1 found something wrong (or nothing), 2 bad usage.
"""

from lilo_volume.cli.main import main
from lilo_volume.cli.output import GOOD, USAGE, WRONG

__all__ = ["GOOD", "USAGE", "WRONG", "main"]
