"""Address and certificate of this process, for HTTP ports that other machines reach."""

from __future__ import annotations

import socket
import ssl
import time

from attrs import frozen

from fray.errors import InvalidRequest
from fray.net.own_address import route_address
from fray.net.tls.identity import TlsIdentity, server_context
from fray.rl.http_access.access import LOOPBACK, OWN_ADDRESS, WILDCARDS
from fray.runtime.actors.server import host_of
from fray.runtime.runtime import current_or_none

LABEL_CHARACTERS = 63


@frozen
class HttpPlace:
    """Place at which a process listens for other machines.

    Attributes:
        host: name or address for URLs.
        bind: address to listen at.
        tls: context of its ports.
    """

    host: str
    bind: str
    tls: ssl.SSLContext


def place_of(host: str, authority: TlsIdentity) -> HttpPlace:
    """Return where this process listens, with a certificate that is issued now.

    Args:
        host: name or address of this machine, or `OWN_ADDRESS`, or one of `WILDCARDS`.
        authority: issues the certificate.

    Raises:
        InvalidRequest: this machine has no address for others, or the host cannot be in a certificate.
    """
    # Here: the import takes 45 ms, and ports on loopback have no use for it.
    from fray.net.tls.certificates import issue_server

    shown, bind = reached_at(host)
    # A longer name cannot be in a certificate.
    names = [*LOOPBACK, *(name for name in [socket.gethostname()] if len(name) <= LABEL_CHARACTERS)]
    names += [_own_address()] if host in WILDCARDS else [shown]
    names = [name for name in dict.fromkeys(names) if name]
    return HttpPlace(shown, bind, server_context(issue_server(authority, names, time.time())))


def reached_at(host: str) -> tuple[str, str]:
    """Return the host for URLs, and the address to listen at.

    Raises:
        InvalidRequest: `OWN_ADDRESS` is asked for, and this machine has none for others.
    """
    if host != OWN_ADDRESS:
        return host, host
    if own := _own_address():
        return own, wildcard_for(own)
    text = "this machine has no address by which others reach it"
    raise InvalidRequest(f"{text}; name one: fray-node --advertise ADDRESS, or instead of {OWN_ADDRESS!r}")


def advertised_host() -> str:
    """Return the address at which other machines call actors of this process; empty if none do."""
    runtime = current_or_none()
    return "" if runtime is None else host_of(runtime).advertise()


def wildcard_for(host: str) -> str:
    """Return the address to listen at for those who use this one, which a router may translate."""
    return "::" if ":" in host else "0.0.0.0"


def _own_address() -> str:
    """Return the address of this machine for others; empty without a network."""
    return advertised_host() or route_address()
