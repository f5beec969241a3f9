"""`FrayIrisClient`: the same on a cluster of Iris."""

from __future__ import annotations

from typing import Any


def shared_iris_client(spec: str) -> Any:
    """The client of this process for ``iris://host:port``. Raises RuntimeError: Iris is not installed."""
    raise RuntimeError(f"{spec}: Iris is not installed here")


def client_of_iris_job() -> Any:
    """The client of the Iris job whose code is running; None: it is none."""
    return None
