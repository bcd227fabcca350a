"""Listener: the socket of a command's server, and the address where it is reached."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from lilo_engine.cli.problems import Problem


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens from now on: a second server on the port fails, and early clients wait instead of failing.

    Raises:
        Problem: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection: an answer of more than one write must not wait for the client between them.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        way = "choose another --port, or 0 for a free one"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            way = "choose a --host that is an address of this machine"
        raise Problem(
            f"cannot listen on {host} port {port}: {error.strerror or error}; {way}"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
