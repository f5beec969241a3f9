"""`RayClient`: the same on a cluster of Ray."""

from __future__ import annotations

from typing import Any


def shared_ray_client(spec: str) -> Any:
    """The client of this process for ``ray`` or ``ray://host:port``. Raises RuntimeError: Ray is not installed."""
    raise RuntimeError(f"{spec}: Ray is not installed here: pip install 'fray[ray]'")
