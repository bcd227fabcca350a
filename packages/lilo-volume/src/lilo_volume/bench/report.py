"""Report: from what nodes measured to the figures; pure, but for starting the nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lilo_volume.bench.settings import GIB, PAIR, Settings
from lilo_volume.errors import VolumeUnavailable

_TIMEOUT_S = 3600.0


def run(settings: Settings, *, quiet: bool = False) -> dict[str, Any]:
    """Start the nodes on a new folder inside `settings.folder`, wait for them, and make the figures.

    Raises:
        VolumeUnavailable: a node failed; what it said is on stderr.
    """
    folder = tempfile.mkdtemp(prefix="lilo-volume-bench-", dir=settings.folder)
    try:
        raw = _run_nodes(dataclasses.replace(settings, folder=folder), quiet=quiet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures(settings, raw)


def figures(settings: Settings, raw: dict[str, Any]) -> dict[str, Any]:
    """The figures; the first is the one that counts. Ratios are of neighbours in one pass, then the median."""
    wall, cpu = raw["wall_s"], raw["cpu_s"]
    gib = settings.shard_bytes * settings.shards / GIB
    ratios = {
        way: [own / plain for own, plain in zip(wall[way], wall[_plain(way)], strict=True)]
        for way in settings.ways
        if not way.startswith("plain")
    }
    return {
        # None without the extra `fast`: the figure is of XXH3.
        "publish_over_write_p50": _round(statistics.median(ratios[PAIR[1]]))
        if PAIR[1] in ratios
        else None,
        "publish_over_write": {way: _summary(values) for way, values in ratios.items()},
        "seconds": {way: _summary(values) for way, values in wall.items()},
        "gib_per_second_p50": {
            way: _round(gib / statistics.median(values)) for way, values in wall.items()
        },
        "extra_cpu_seconds_per_gib": {
            way: _round((statistics.median(cpu[way]) - statistics.median(cpu[_plain(way)])) / gib)
            for way in ratios
        },
        "verify_full": {
            way: _verify_summary(samples) for way, samples in sorted(raw["verify"].items())
        },
        "memory_growth_bytes": raw["memory_growth_bytes"],
        "size_bytes": settings.shard_bytes * settings.shards,
        "shards": settings.shards,
        "nodes": settings.nodes,
        "passes": settings.passes,
        "load_1m": _round(os.getloadavg()[0]),
        "cpus": os.cpu_count(),
    }


def _plain(way: str) -> str:
    """What a way is compared with: plain writing with the same fsync policy."""
    return "plain_fsync" if way.endswith("_fsync") else "plain"


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "p50": _round(statistics.median(values)),
        "min": _round(min(values)),
        "max": _round(max(values)),
    }


def _verify_summary(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of the best of all samples: what a rate is when nothing else is in its way."""
    best = {
        name: max(sample[name] for sample in samples)
        for name in ("verify", "read_and_digest", "digest")
    }
    return {
        **{f"{name}_gib_per_second": _round(rate / GIB) for name, rate in best.items()},
        "verify_over_read_and_digest": _round(best["verify"] / best["read_and_digest"]),
        "verify_over_digest": _round(best["verify"] / best["digest"]),
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _run_nodes(settings: Settings, *, quiet: bool) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    raw, token = settings.to_json(), os.urandom(16).hex()
    command = [sys.executable, "-m", "lilo_volume.bench.node", raw]
    log = Path(settings.folder).parent / f"{Path(settings.folder).name}.log"
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(log.open("w+b")) if quiet else None
        stack.callback(log.unlink, missing_ok=True)
        nodes = [
            subprocess.Popen(
                [*command, str(rank), address, token],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=said,
            )
            for rank in range(settings.nodes)
        ]
        codes, output = _waited(nodes)
        if any(codes):
            last = log.read_text("utf-8", "replace").strip().splitlines()[-1:] if quiet else []
            raise VolumeUnavailable(
                f"nodes of the benchmark ended with {codes}; {''.join(last) or 'see what they said'}"
            )
    return json.loads(output)


def _waited(nodes: list[subprocess.Popen[bytes]]) -> tuple[list[int], bytes]:
    """Exit codes, and what rank 0 printed; no node outlives this."""
    try:
        output, _ = nodes[0].communicate(timeout=_TIMEOUT_S)
        return [node.wait(timeout=60) for node in nodes], output
    except subprocess.TimeoutExpired as error:
        raise VolumeUnavailable(f"the benchmark did not end within {_TIMEOUT_S} s") from error
    finally:
        for node in nodes:
            node.kill()
            node.wait()
