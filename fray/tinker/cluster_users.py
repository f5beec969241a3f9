"""Users of the cluster, for whom the service may launch jobs: they are its users, where the cluster has any."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import trio

from fray.api.cluster import Cluster
from fray.errors import FrayError
from fray.model.text import near_text

CHECK_S = 10.0
"""Pause between two readings of the users: so long the key of one who was removed is still accepted."""

log = logging.getLogger("fray.tinker")


class ClusterUsers:
    """Users of the cluster, as `run` has read them last."""

    def __init__(self) -> None:
        self.weights: Mapping[str, float] | None = None
        """Weights of the shares of those for whom the service may launch jobs; None: the cluster has no users."""

    async def run(self, cluster: Cluster, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the users until cancelled; reports `started` after the first time. Raises FrayError if that fails."""
        self.weights = await cluster.launch_users()
        task_status.started()
        while True:
            await trio.sleep(CHECK_S)
            try:
                self.weights = await cluster.launch_users()
            except FrayError as error:
                log.warning("the users of the cluster cannot be read; those that were read last count: %s", error)

    def has(self, name: str) -> bool:
        """Return whether the service works for a user of its own of this name."""
        return self.weights is None or name in self.weights

    def refusal_of(self, name: str) -> str:
        """Return why a name cannot be that of a user of the service; empty: it can."""
        if self.weights is None or name in self.weights:
            return ""
        return (
            f"username {name!r:.100}: the cluster has users, and this service may launch jobs for none of this name"
            f"{near_text(name, self.weights)}; `fray user add` adds users, and the cluster's policy says for whom a "
            "service may launch jobs: launches_for, below the user who started it"
        )
