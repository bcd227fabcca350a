"""Network: which of this machine's addresses and interfaces others in the cluster can reach. Nothing is opened here."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import psutil

from lilo_engine.errors import InvalidRequest

UNROUTED = "192.0.2.1"
"""An address of nobody (RFC 5737): asking for the way to it names the interface of the default route."""


def interface_of(address: str) -> str | None:
    """The interface that has this address; None if no interface of this machine has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def own_address() -> str:
    """The private address that this machine is reached by: of the default route's interface, else loopback.

    Raises:
        InvalidRequest: that address is public: strangers would reach Ray, which asks for no token by default.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((UNROUTED, 9))  # sends nothing
            address = str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
    check_private(address)
    return address


def check_private(address: str) -> None:
    """Refuse an address that strangers can reach: who reaches Ray can run programs on the cluster.

    Raises:
        InvalidRequest: it is no address, is public, or this machine does not have it.
    """
    try:
        private = ip_address(address).is_private
    except ValueError as error:
        raise InvalidRequest(
            f"{address!r} is no IP address; expected one that this machine has in a private network"
        ) from error
    if not private:
        raise InvalidRequest(
            f"{address} is a public address, and whoever reaches Ray can run programs on the cluster; choose one of a "
            "private network with --address"
        )
    if interface_of(address) is None:
        here = ", ".join(
            sorted(
                one.address
                for addresses in psutil.net_if_addrs().values()
                for one in addresses
                if one.family == socket.AF_INET
            )
        )
        raise InvalidRequest(f"this machine does not have the address {address}; it has {here}")
