"""Ray's token authentication, as it has it from 2.52 on: Fray only sees to it that it is on when a token is named.

Ray reads the token: ``RAY_AUTH_TOKEN``, or the file ``RAY_AUTH_TOKEN_PATH``, or ``~/.ray/auth_token``; and asks for
it where ``RAY_AUTH_MODE=token``. Fray reads no token, so none can be in its logs, pickles or errors.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def prepare(variables: MutableMapping[str, str] = os.environ) -> None:
    """Switch token authentication on where a token is named and nothing else is said.

    Raises:
        RuntimeError: ``RAY_AUTH_TOKEN_PATH`` names a file that is not there.
    """
    path = variables.get(TOKEN_PATH)
    wanted = variables.get(MODE, "token") == "token"
    if wanted and path and not variables.get(TOKEN) and not Path(path).is_file():
        raise RuntimeError(f"{TOKEN_PATH}={path}: there is no such file; `ray get-auth-token --generate` makes a token")
    if variables.get(TOKEN) or path:
        variables.setdefault(MODE, "token")
    if variables.get(MODE) == "token" and variables is os.environ:
        _reread()


def _reread() -> None:
    """Ray read its variables when it was imported; a mode that is newer than that would be of no effect."""
    try:
        from ray import _raylet
    except ImportError:
        return
    native: Any = _raylet
    native.Config.initialize("")


def refused(error: BaseException | None) -> bool:
    """Whether Ray could not be reached for want of the right token."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__}: {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def refusal() -> RuntimeError:
    """What to do about it, without the token."""
    return RuntimeError(
        f"this Ray lets nobody in without its token: set {TOKEN_PATH} (or {TOKEN}) to the token that it was started "
        f"with, and {MODE}=token"
    )
