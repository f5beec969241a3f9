"""Address of this machine for others: the one from which the controller sees it, unless it is translated on the way."""

from __future__ import annotations

import ipaddress
import socket

ELSEWHERE = ("192.0.2.1", 9)
"""Address of another network, which is for documentation: the kernel says by which of its own it would reach it."""


def ip_of(origin: str) -> str:
    """Return the IP address in the origin of a TCP connection (``tcp:IP:PORT``); empty for other connections."""
    scheme, _, place = origin.partition(":")
    return place.rpartition(":")[0] if scheme == "tcp" else ""


def own_address(seen_from: str) -> str:
    """Return the address from which a peer sees this machine, if others may dial it; else the empty string.

    That is, if the address belongs to this machine, and not to a router that translates it (NAT), and is not loopback.
    """
    try:
        found = ipaddress.ip_address(seen_from)
    except ValueError:
        return ""
    # A listener for both versions sees dialers of version 4 at mapped addresses.
    address = (found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None) or found
    if address.is_loopback or address.is_unspecified or address.is_link_local:
        return ""
    family = socket.AF_INET6 if isinstance(address, ipaddress.IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # The kernel binds addresses of this machine only; nothing is sent.
            probe.bind((str(address), 0))
    except OSError:
        return ""
    return str(address)


def route_address() -> str:
    """Return the address of this machine on its route to other networks; empty without one. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A datagram socket: connecting it only chooses the route.
            probe.connect(ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
