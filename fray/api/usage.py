"""Who waits, and who has how much: what a cluster says of its queue and its shares."""

from __future__ import annotations

from fray.errors import InvalidRequest
from fray.model.messages.usage import (
    GetQueue,
    GetUsage,
    QueueInfo,
    UsageInfo,
)
from fray.runtime.runtime import Runtime


class UsageQueries:
    """What `Cluster` says of shares."""

    _runtime: Runtime

    async def queue(self, *, limit: int = 100, user: str | None = None) -> QueueInfo:
        """What waits for machines, in the order in which it is tried.

        The order is that of this moment: whoever is given something goes behind those who have less.

        Args:
            limit: longest list, 1,000 at most.
            user: only what is this user's.

        Raises:
            InvalidRequest: a limit below 1.
        """
        if limit < 1:
            raise InvalidRequest(f"limit={limit} must be 1 or more")
        reply = await self._runtime.link.request(GetQueue(limit=limit, user=user))
        assert isinstance(reply, QueueInfo)
        return reply

    async def usage(self, *, samples: bool = False) -> UsageInfo:
        """What users and their namespaces have of the cluster and had, their weights and quotas.

        Args:
            samples: with utilisation and shares over time, since the controller has started.
        """
        reply = await self._runtime.link.request(GetUsage(samples=samples))
        assert isinstance(reply, UsageInfo)
        return reply
