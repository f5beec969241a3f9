"""Environment that a node passes to its jobs."""

from __future__ import annotations

from collections.abc import Mapping

from fray.net.service_manager import VARIABLES

STATE_MARK = "FRAY_NODE_STATE"
"""Variable that marks every process below a node: state directories of the nodes it is below, joined by ``:``."""


def mark_argument(environ: Mapping[str, str]) -> str:
    """Return the argument by which a process without a readable environment is recognised, and all that it forks."""
    return f"{STATE_MARK}={environ.get(STATE_MARK, '')}"


def node_environ(environ: Mapping[str, str], state_dir: str) -> dict[str, str]:
    """Return what a node passes to its jobs: its own environment without Fray's variables (the token is one) and those
    of its service manager, and the mark."""
    handed = {key: value for key, value in environ.items() if not key.startswith("FRAY_") and key not in VARIABLES}
    # A node within a job of another node adds its mark, so that either node finds what is left.
    marks = environ.get(STATE_MARK, "").split(":")
    return {**handed, STATE_MARK: ":".join(filter(None, [*marks, *([] if state_dir in marks else [state_dir])]))}
