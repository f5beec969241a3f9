"""Queries about the queue, and about usage and shares of the cluster."""

from __future__ import annotations

from fray.errors import InvalidRequest
from fray.model.messages.usage import (
    ClusterCounts,
    GetCounts,
    GetQueue,
    GetUsage,
    QueueInfo,
    UsageInfo,
)
from fray.runtime.runtime import Runtime


class UsageQueries:
    """Queries of a `Cluster` about queue and shares."""

    _runtime: Runtime

    async def queue(self, *, limit: int = 100, user: str | None = None) -> QueueInfo:
        """Return the jobs that wait for machines, in the order in which the scheduler tries them.

        The order is that of this moment: a tenant that gets machines moves behind those that have less.

        Args:
            limit: longest list, 1,000 at most.
            user: only jobs of this user.

        Raises:
            InvalidRequest: a limit below 1.
        """
        if limit < 1:
            raise InvalidRequest(f"limit={limit} must be 1 or more")
        reply = await self._runtime.client.request(GetQueue(limit=limit, user=user))
        assert isinstance(reply, QueueInfo)
        return reply

    async def usage(self, *, samples: bool = False) -> UsageInfo:
        """Return present and past usage of the cluster by users and namespaces, with their weights and quotas.

        Args:
            samples: with utilisation and shares over time, since the controller started.
        """
        reply = await self._runtime.client.request(GetUsage(samples=samples))
        assert isinstance(reply, UsageInfo)
        return reply

    async def counts(self) -> ClusterCounts:
        """Return numbers of jobs by user and state, of ends by cause, of waits, and of reservations.

        Raises:
            Unsupported: the controller is of an earlier release.
        """
        reply = await self._runtime.client.request(GetCounts())
        assert isinstance(reply, ClusterCounts)
        return reply
