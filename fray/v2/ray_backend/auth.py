"""Token authentication of Ray (from 2.52 on): switched on when a token is named.

Ray reads the token itself: ``RAY_AUTH_TOKEN``, or the file ``RAY_AUTH_TOKEN_PATH``, or ``~/.ray/auth_token``; it
requires one if ``RAY_AUTH_MODE=token``. Fray reads no token, so none can be in its logs, pickles or errors.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def prepare(variables: MutableMapping[str, str] = os.environ) -> None:
    """Switch token authentication on if a token is named and ``RAY_AUTH_MODE`` is not set.

    Raises:
        RuntimeError: the file that ``RAY_AUTH_TOKEN_PATH`` names does not exist.
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
    """Make Ray read its variables again: it read them at its import, before the mode was set."""
    try:
        from ray import _raylet
    except ImportError:
        return
    native: Any = _raylet
    native.Config.initialize("")


def refused(error: BaseException | None) -> bool:
    """Return whether Ray refused the connection because of a missing or wrong token."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__}: {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def refusal() -> RuntimeError:
    """Return the error for a refused token, which says what to set and does not contain the token."""
    return RuntimeError(
        f"authentication required by Ray: set {TOKEN_PATH} (or {TOKEN}) to the token of the cluster, and {MODE}=token"
    )
