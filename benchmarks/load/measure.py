"""What is measured beside wall time: percentiles, and the CPU and memory of a process tree.

Figures that need psutil or /proc are None without them; the driver then reports wall times only.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

try:
    import psutil
except ImportError:  # the driver needs nothing but the SDK
    psutil: Any = None


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summary(seconds: list[float]) -> dict[str, float]:
    """Mean, median, 95th percentile, extremes, in milliseconds; empty for no values."""
    if not seconds:
        return {}
    return {
        "n": len(seconds),
        "mean_ms": round(1e3 * statistics.fmean(seconds), 2),
        "p50_ms": round(1e3 * percentile(seconds, 0.5), 2),
        "p95_ms": round(1e3 * percentile(seconds, 0.95), 2),
        "min_ms": round(1e3 * min(seconds), 2),
        "max_ms": round(1e3 * max(seconds), 2),
    }


def tree_memory(pid: int | None) -> dict[str, int] | None:
    """Resident and proportional memory of a process and its descendants, in MiB."""
    rss = pss = count = 0
    for process in _tree(pid):
        try:
            info = process.memory_full_info()
        except psutil.Error:
            continue
        count += 1
        rss += info.rss
        pss += getattr(info, "pss", info.rss)
    return {"procs": count, "rss_mib": rss >> 20, "pss_mib": pss >> 20} if count else None


def tree_cpu(pid: int | None) -> float | None:
    """CPU seconds (user and system) that a process and its living descendants have used."""
    total, count = 0.0, 0
    for process in _tree(pid):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        count += 1
        total += times.user + times.system
    return total if count else None


def machine_cpu() -> float | None:
    """CPU seconds the whole machine has used, to see what else ran during a section."""
    try:
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def difference(after: float | None, before: float | None) -> float | None:
    """`after - before`, or None if either is."""
    return None if after is None or before is None else after - before


def _tree(pid: int | None) -> list:
    if pid is None or psutil is None:
        return []
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
