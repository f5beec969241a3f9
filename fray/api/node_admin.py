"""Administration of a cluster's machines: list, scale, cordon, drain, and forecasts of placement."""

from __future__ import annotations

import trio

from fray.api.jobs.job_spec import build_forecast_spec
from fray.errors import DeadlineExceeded, InvalidRequest
from fray.model.messages.client import ListNodes, NodeInfo, Nodes
from fray.model.messages.machine_groups import ListMachines, Machines, ScaleGroup
from fray.model.messages.maintenance import CordonNodes, Forecast, NodesMarked, UncordonNodes, WhatIf
from fray.model.requests import JobRequest
from fray.runtime.runtime import Runtime

FINISH_S = 3600.0
"""Default seconds that a drain with ``let_finish`` waits for jobs."""
LOOK_EVERY_S = 0.1
"""Seconds between polls: clients are not notified of changes of machines."""


class NodeAdmin:
    """Part of a `Cluster` that administers machines."""

    _runtime: Runtime

    async def nodes(self) -> list[NodeInfo]:
        """Return the machines of the cluster."""
        reply = await self._runtime.client.request(ListNodes())
        assert isinstance(reply, Nodes)
        return list(reply.nodes)

    async def node_changes(self, since: int = 0, *, wait_s: float = 0.0) -> Nodes:
        """Return the machines that have changed after an earlier answer, and the names of those that have left, to keep
        a list of all machines up to date at the cost of its changes.

        Args:
            since: ``change`` of the earlier answer; 0: all machines.
            wait_s: seconds to wait for a change, at most 10, if there is none yet.
        """
        reply = await self._runtime.client.request(ListNodes(changed_since=since, wait_s=wait_s))
        assert isinstance(reply, Nodes)
        return reply

    async def wait_for_nodes(self, count: int, timeout: float = 60.0) -> list[NodeInfo]:
        """Wait until ``count`` machines are alive; return them.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds.
        """
        with trio.move_on_after(timeout):
            while len(alive := [node for node in await self.nodes() if node.alive]) < count:  # noqa: ASYNC110
                await trio.sleep(LOOK_EVERY_S)
            return alive
        raise DeadlineExceeded(f"the cluster has fewer than {count} nodes after {timeout:g} s")

    async def list_machines(self, group: str = "") -> Machines:
        """Return the machine groups: the units each wants, has requested, sees and has joined.

        Args:
            group: only this group.

        Raises:
            InvalidRequest: there is no such group.
        """
        reply = await self._runtime.client.request(ListMachines(group=group))
        assert isinstance(reply, Machines)
        return reply

    async def scale_group(self, group: str, *, min: int | None = None, max: int | None = None) -> None:
        """Set minimum and maximum of a machine group in place of its policy, until they are set again. Units beyond
        ``max`` accept no new work and are removed when they are empty. None: as in the policy.

        Raises:
            InvalidRequest: no such group, or ``min`` is above ``max``.
            Unauthorized: this is a job.
        """
        await self._runtime.client.request(ScaleGroup(group=group, min=min, max=max))

    async def cordon(self, *nodes: str, reason: str = "") -> NodesMarked:
        """Place nothing new on these machines, until `uncordon`; running jobs continue.

        The hosts of a TPU slice are one unit: naming one of them means all, and the reply lists them. A cordon outlives
        restarts of the controller and of the machines.

        Args:
            reason: shown by `nodes`, ``fray nodes`` and `explain`.

        Raises:
            InvalidRequest: there is no such machine; nothing was done.
        """
        return await self._mark(CordonNodes(nodes=nodes, reason=reason))

    async def uncordon(self, *nodes: str) -> NodesMarked:
        """Use these machines again: end cordon, drain and quarantine. Jobs that a drain has asked to end still end.

        Raises:
            InvalidRequest: there is no such machine; nothing was done.
        """
        return await self._mark(UncordonNodes(nodes=nodes))

    async def drain(
        self,
        *nodes: str,
        reason: str = "",
        let_finish: bool = False,
        deadline_s: float | None = None,
        wait: bool = False,
    ) -> NodesMarked:
        """Cordon these machines, and move what runs there to others.

        Jobs end as preempted (on their preemption budget), gangs as a whole, each by its termination policy; actors
        restart by their own rules. Units as in `cordon`.

        Args:
            let_finish: wait for jobs that may end by themselves; actors are moved at once.
            deadline_s: seconds to wait for them; implies ``let_finish``. Default 3600 with it; 0: do not wait.
            wait: return when nothing runs there any more; bound it with a cancel scope.

        Raises:
            InvalidRequest: there is no such machine, or the deadline is negative or infinite; nothing was done.
        """
        finish_s = deadline_s if deadline_s is not None else FINISH_S if let_finish else 0.0
        if not 0 <= finish_s < float("inf"):
            raise InvalidRequest(f"deadline_s={finish_s} must be 0 or more seconds")
        marked = await self._mark(CordonNodes(nodes=nodes, reason=reason, drain=True, finish_s=finish_s))
        return await self._wait_drained(marked) if wait else marked

    async def what_if(self, request: JobRequest) -> Forecast:
        """Return a forecast for a request: whether and where it would start now, what it would wait for, or why it can
        never run.

        Nothing is launched and nothing changes. The request needs no entrypoint.

        Raises:
            InvalidRequest: the request is invalid.
        """
        reply = await self._runtime.client.request(WhatIf(job=build_forecast_spec(request, self._runtime)))
        assert isinstance(reply, Forecast)
        return reply

    async def _wait_drained(self, marked: NodesMarked) -> NodesMarked:
        """Wait until none of the machines is draining: drained, removed from the cluster, or uncordoned by another
        client.
        """
        names = {node.name for node in marked.nodes}
        while True:
            found = [node for node in await self.nodes() if node.name in names]
            if not any(node.standing == "draining" for node in found):
                return NodesMarked(nodes=tuple(found), notes=marked.notes)
            await trio.sleep(LOOK_EVERY_S)

    async def _mark(self, request: CordonNodes | UncordonNodes) -> NodesMarked:
        reply = await self._runtime.client.request(request)
        assert isinstance(reply, NodesMarked)
        return reply
