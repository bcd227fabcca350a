"""What others need to test their parts against lilo-volume: a contract for volumes, and ranks as threads."""

from lilo_volume.testing.contract import VOLUME_CONTRACT
from lilo_volume.testing.threads import ThreadGroup, run_ranks, thread_groups

__all__ = ["VOLUME_CONTRACT", "ThreadGroup", "run_ranks", "thread_groups"]
