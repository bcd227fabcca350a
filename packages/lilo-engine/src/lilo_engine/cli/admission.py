"""Admission: the API keys with which a server starts: given, made, or those there are."""

from __future__ import annotations

import time
from pathlib import Path

from lilo_engine.cli.listener import is_loopback
from lilo_engine.cli.problems import Problem
from lilo_engine.config import API_KEY_VARIABLE
from lilo_engine.control.keys import Keys


def admit(keys: Keys, host: str, given: str | None, file: Path | None) -> None:
    """Accept the given key; without any, make one and print it once.

    Args:
        keys: of the records.
        host: where the server listens.
        given: a key, as typed or from the environment.
        file: a file with a key; made if missing.

    Raises:
        Problem: there is no key, and other machines reach `host`.
        InvalidRequest: the given key is not one that the SDK would send.
    """
    if file is not None and file.exists():
        given = file.read_text("utf-8").strip()
    if given is not None:
        keys.create("given at start", time.time(), key=given, operator=True)
        return
    if file is not None:
        _write_private(file, keys.create("made at start", time.time(), operator=True))
        return
    if keys.any():
        return
    if not is_loopback(host):
        raise Problem(
            f"{host} can be reached from other machines and there is no API key yet; make one with "
            f"`lilo keys create`, or give one with --api-key, --api-key-file or {API_KEY_VARIABLE}"
        )
    made = keys.create("made at start", time.time(), operator=True)
    print(f"lilo: API key (shown once): {made}", flush=True)


def _write_private(file: Path, key: str) -> None:
    file.touch(mode=0o600)
    file.write_text(f"{key}\n", "utf-8")
