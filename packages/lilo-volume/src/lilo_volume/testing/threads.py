"""Ranks as threads, where tests look for them; they live in `lilo_volume.groups.threads`."""

from lilo_volume.groups.threads import ThreadGroup, run_ranks, thread_groups

__all__ = ["ThreadGroup", "run_ranks", "thread_groups"]
