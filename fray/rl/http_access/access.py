"""Certificate authority and key of the HTTP ports of a run or a service, kept in its directory."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from attrs import field, frozen

from fray.errors import InvalidRequest
from fray.net.atomic_file import write_atomically
from fray.net.tls.identity import TlsIdentity

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that other machines cannot reach: HTTP ports there need neither TLS nor a key."""
OWN_ADDRESS = "auto"
"""Host that stands for the address of each machine."""
WILDCARDS = ("0.0.0.0", "::")
"""Hosts for listening at all addresses of a machine."""
ACCESS_DIRECTORY = "http"
AUTHORITY_FILE, AUTHORITY_KEY_FILE, KEY_FILE = "ca.pem", "ca.key", "key"
KEY_BYTES = 32
NAME = "fray HTTP ports"


@frozen
class HttpAccess:
    """Access to HTTP ports from other machines.

    Args:
        host: name or address of the machine, or `OWN_ADDRESS`, or one of `WILDCARDS`.
        authority: issues the certificates of the ports; clients trust it.
        key: that requests show: ``Authorization: Bearer KEY``.
    """

    host: str
    authority: TlsIdentity
    key: str = field(repr=False)


def make_access(host: str) -> HttpAccess:
    """Return access with a new authority and a new key, in memory."""
    return HttpAccess(host, _make_authority(), secrets.token_urlsafe(KEY_BYTES))


def load_access(host: str, directory: Path) -> HttpAccess:
    """Return the access that is kept in a directory; make it if there is none. Blocks.

    So clients need nothing new when a run is started again. The caller owns the directory alone.

    Raises:
        InvalidRequest: a file is damaged.
        OSError: the files can be neither read nor written.
    """
    authority, file = load_authority(directory), directory / ACCESS_DIRECTORY / KEY_FILE
    if not file.is_file():
        write_atomically(file, secrets.token_urlsafe(KEY_BYTES).encode())
    try:
        key = file.read_text("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if len(key) < KEY_BYTES:
        raise InvalidRequest(f"{file}: expected {KEY_BYTES} characters or more; remove it, and a new key is made")
    return HttpAccess(host, authority, key)


def load_authority(directory: Path) -> TlsIdentity:
    """Return the authority that is kept in a directory, below `ACCESS_DIRECTORY`, as `load_access`."""
    # Here: the import takes 45 ms, and ports on loopback have no use for it.
    from fray.net.tls.certificates import check_identity

    chain, key = (directory / ACCESS_DIRECTORY / name for name in (AUTHORITY_FILE, AUTHORITY_KEY_FILE))
    if not chain.is_file():
        made = _make_authority()
        chain.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(key, made.key)
        # The last one: where it is, its key is.
        write_atomically(chain, made.chain, mode=0o644)
        return made
    try:
        authority = TlsIdentity(chain.read_bytes(), key.read_bytes())
    except FileNotFoundError:
        text = "the key of this authority is missing; remove the file, and a new one is made, which clients then need"
        raise InvalidRequest(f"{chain}: {text}") from None
    check_identity(authority, f"{chain} with {key}", time.time(), authority=True)
    return authority


def _make_authority() -> TlsIdentity:
    from fray.net.tls.certificates import make_authority

    return make_authority(NAME, time.time())


def check_host(name: str, host: object) -> None:
    """Raise InvalidRequest if a host, the value of a setting of this name, cannot be that of a URL."""
    is_text = isinstance(host, str) and host and host.isprintable() and not set(host) & set(" /[]@?#%")
    if not is_text or host in WILDCARDS:
        expected = f"'127.0.0.1', {OWN_ADDRESS!r} for the address of each machine, or a name or address of this one"
        raise InvalidRequest(f"invalid {name} {host!r}: expected {expected}")
