"""Address of a controller, from what a user has written: with TLS beyond this machine."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence

from fray.errors import InvalidRequest
from fray.net.own_address import route_address
from fray.net.tls.identity import PINS_LIMIT, check_fingerprint

PIN_VARIABLE = "FRAY_CA_FINGERPRINT"
INSECURE_VARIABLE = "FRAY_INSECURE"

_log = logging.getLogger("fray.net")


def controller_address(
    host: str,
    port: int,
    written: str,
    pins: str,
    environ: Mapping[str, str],
    token_pins: Sequence[str] = (),
    *,
    insecure: bool = False,
) -> str:
    """Return ``tls:HOST:PORT#FINGERPRINT``, or ``tcp:HOST:PORT`` on this machine, or where that was asked for.

    Args:
        written: the whole address as the user wrote it, for messages.
        pins: what followed its ``#``. Default: ``FRAY_CA_FINGERPRINT``, else those of the token.

    Raises:
        InvalidRequest: another machine, and no fingerprint; or ``insecure`` and a public address.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if pins:
        return _pinned(place, pins.split(","), written)
    if is_loopback(host):
        return f"tcp:{place}"
    if insecure:
        check_private(host, written)
        warn_insecure(written)
        return f"tcp:{place}"
    if environ.get(PIN_VARIABLE, "").strip():
        return _pinned(place, environ[PIN_VARIABLE].split(","), PIN_VARIABLE)
    if token_pins:
        return _pinned(place, token_pins, "the token")
    raise InvalidRequest(
        f"{written} is another machine, and the fingerprint of its certificate authority is missing: write "
        f"{written}#FINGERPRINT, or set {PIN_VARIABLE}, or use the token from the controller's store, which contains "
        "it; `fray ca show` on the controller prints it"
    )


def _pinned(place: str, pins: Sequence[str], where: str) -> str:
    if len(pins) > PINS_LIMIT:
        raise InvalidRequest(f"{where}: at most {PINS_LIMIT} fingerprints, separated by a comma")
    return f"tls:{place}#{','.join(check_fingerprint(pin, where) for pin in pins)}"


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine, by its name or address alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_elsewhere(address: str) -> bool:
    """Return whether the address of a controller is another machine, by the address alone."""
    scheme, _, place = address.partition("#")[0].partition(":")
    return scheme in ("tcp", "tls") and not is_loopback(place.rpartition(":")[0])


def is_insecure(address: str) -> bool:
    """Return whether an address (``tcp:HOST:PORT``) is another machine without TLS."""
    scheme, _, place = address.partition(":")
    return scheme == "tcp" and not is_loopback(place.rpartition(":")[0])


def check_private(host: str, written: str) -> None:
    """Raise InvalidRequest if a host without TLS would be a public one."""
    plain = host.strip("[]")
    if plain in ("0.0.0.0", "::", ""):
        plain = route_address() or "127.0.0.1"
    try:
        public = ipaddress.ip_address(plain).is_global
    except ValueError:
        public = _resolves_to_public(plain)
    if public:
        raise InvalidRequest(
            f"{written} is a public address ({plain}), where --insecure is refused: everyone could read the traffic "
            "and take over connections. Leave --insecure (of drivers: FRAY_INSECURE) out"
        )


def warn_insecure(written: str) -> None:
    """Log that a connection is not encrypted."""
    _log.warning(
        "INSECURE: traffic of %s is neither encrypted nor protected against changes; anyone on the network path can "
        "read secrets and run code. --insecure and FRAY_INSECURE are for tests only",
        written,
    )


def _resolves_to_public(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the connection will fail with the reason
    return any(ipaddress.ip_address(str(target[0]).partition("%")[0]).is_global for *_, target in found)
