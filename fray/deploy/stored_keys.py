"""Keys of this person for clusters, in ``~/.config/fray/keys.json`` (made by `fray.deploy.login`).

Invariants: the directory has mode 0700 and the file 0600. Little is imported here: a driver looks for a default cluster
before it imports anything else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from fray.errors import InvalidRequest

if TYPE_CHECKING:
    from fray.net.transport import Credential

FILE = "keys.json"


@frozen(kw_only=True)
class StoredKey:
    """Key of this person for one cluster."""

    spec: str
    """Cluster spec with which it was made: ``fray://host:port``."""
    invitation_id: str
    secret: str = field(repr=False)
    user: str = ""
    """Empty until the invitation was redeemed."""
    role: str = ""
    expires_at: float = 0.0
    """Seconds since the epoch, by the clock of this machine."""
    pins: Sequence[str] = ()
    """Fingerprints of the cluster's certificate authority, from the invitation; empty: it had none."""

    @property
    def credential(self) -> Credential:
        from fray.model.access.user_keys import INVITATION_KEY, USER_KEY, derive_verifier
        from fray.net.transport import Credential

        # The verifier was derived with the id of the invitation, as the id of the key was not known then.
        verifier = derive_verifier(self.secret, INVITATION_KEY + self.invitation_id)
        return Credential(USER_KEY + self.invitation_id, verifier)


def directory() -> Path:
    """Return the directory of this person's configuration: ``$XDG_CONFIG_HOME/fray``, else ``~/.config/fray``."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home, "fray").expanduser()


def default_spec() -> str | None:
    """Return the cluster of the last login; None: there was none, or this process belongs to a job."""
    # A program that a job executes has the home directory of the node's account, whose logins are not the job's.
    if "FRAY_ATTEMPT_ID" in os.environ:
        return None
    default = read().get("default")
    return default if isinstance(default, str) else None


def place_of(address: str) -> str:
    """Return the name under which the key for a controller's address is stored: the same with TLS and without."""
    return address.partition("#")[0].removeprefix("tcp:").removeprefix("tls:")


def find_key(address: str) -> StoredKey | None:
    """Return the key for a controller's address (in the notation of `fray.net`); None: there is none.

    Raises:
        InvalidRequest: it has expired, or the file is readable by others.
    """
    record = read().get("clusters", {}).get(place_of(address))
    if record is None or "FRAY_ATTEMPT_ID" in os.environ:
        return None
    key = parse(record)
    if not key.user:
        return None
    if key.expires_at <= time.time():
        raise InvalidRequest(
            f"the key of {key.user} for {key.spec} has expired: ask an admin for an invitation (`fray user add "
            f"{key.user} --role {key.role}`), then `fray login {key.spec}`"
        )
    return key


# On disk -------------------------------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    """Return the content of the file; empty if there is none. Raises InvalidRequest."""
    file = directory() / FILE
    try:
        mode = file.stat().st_mode & 0o077
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except PermissionError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}; remove it, and `fray login` again") from None
    if mode:
        raise InvalidRequest(f"{file} is readable by other users: chmod 600 it, or remove it and `fray login` again")
    return content if isinstance(content, dict) else {}


def parse(record: dict[str, Any]) -> StoredKey:
    """Return a record as a key. Raises InvalidRequest."""
    try:
        return StoredKey(**record)
    except TypeError as error:
        raise InvalidRequest(
            f"{directory() / FILE} is of another version: {error}; remove it, and `fray login` again"
        ) from None


def write(content: dict[str, Any]) -> None:
    """Replace the content of the file. Raises OSError."""
    from fray.net.atomic_file import write_atomically

    place = directory()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(place / FILE, json.dumps(content, indent=1).encode(), durable=True)
