"""File in a service's directory with its address and a key, readable by the owner alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from attrs import asdict, frozen

from fray.errors import InvalidRequest

OPERATOR_FILE = "operator.json"


@frozen
class OperatorAccess:
    """Access to a running service.

    Attributes:
        url: its address.
        key: of an administrator, until the service ends: each start makes another, and it is in no table.
        certificate: file with the service's certificate, with https; empty: http.
    """

    url: str
    key: str
    certificate: str = ""


def default_directory() -> Path:
    """Return the directory of a service that was given none: ``~/.local/state/fray/tinker`` (XDG_STATE_HOME counts)."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser().absolute() / "fray" / "tinker"


def write_operator_file(directory: Path, access: OperatorAccess) -> None:
    """Write the file, readable by the owner alone. Raises OSError."""
    unfinished = directory / f"{OPERATOR_FILE}.new"
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(access), file)
    unfinished.replace(directory / OPERATOR_FILE)


def read_operator_file(directory: Path) -> OperatorAccess:
    """Read the file. Raises InvalidRequest if there is none, or it may not be read."""
    path = directory / OPERATOR_FILE
    try:
        return OperatorAccess(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not written by a service"
        raise InvalidRequest(
            f"{path}: {reason}; expected the directory of a service: fray tinker serve --directory {directory}"
        ) from None
