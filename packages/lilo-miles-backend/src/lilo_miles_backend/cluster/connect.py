"""Connect: this process's connection to a Ray cluster, opened for one trainer and closed with it."""

from __future__ import annotations

import logging
import socket

import ray
from lilo_engine.errors import InvalidRequest, Unavailable

from lilo_miles_backend.config import RAY_ADDRESS, add_to_environment

CONNECT_LIMIT_S = 5.0
"""For the head to take a connection: it runs already, or is none."""


def connect(address: str) -> None:
    """Join the cluster as a driver.

    Raises:
        InvalidRequest: the address is none.
        Unavailable: nothing answers there, or this machine is no member of that cluster.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        raise InvalidRequest(
            f"{address!r} is no address of a Ray cluster; expected HOST:PORT, as `lilo cluster head` prints it "
            f"(--ray, or {RAY_ADDRESS})"
        )
    try:
        # Ray itself would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S).close()
    except OSError as error:
        raise Unavailable(
            f"no Ray cluster answers at {address} ({error}); start one with `lilo cluster head`"
        ) from error
    # What ranks print is passed on into a log file, and its last lines into errors that clients read.
    add_to_environment({"RAY_COLOR_PREFIX": "0"})
    assert not ray.is_initialized(), "one trainer per process: its connection is closed with it"
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        ray.shutdown()
        raise Unavailable(
            f"the Ray cluster at {address} cannot be joined from this machine: {error}; run `lilo serve` on one of "
            "its nodes"
        ) from error


def disconnect() -> None:
    """Leave it; what this driver started there ends."""
    ray.shutdown()
