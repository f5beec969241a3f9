"""`FrayClient`: the same on a cluster of Fray."""

from __future__ import annotations

from typing import Any


def running_actor() -> Any:
    """The actor of this process, when its code runs on a cluster of Fray."""
    return None


def client_of_fray_job() -> Any:
    """The client of the Fray job whose code is running; None: it is none."""
    return None


def shared_fray_client(spec: str) -> Any:
    """The client of this process for a spec of `fray.open_cluster`."""
    raise RuntimeError(f"{spec}: no client yet")
