"""The machines of a cluster: looking at them, those that can be had, and taking them out of service."""

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
"""How long a drain lets jobs finish that may end by themselves, unless it says for how long."""
LOOK_EVERY_S = 0.1
"""Machines have no subscription."""


class NodeAdmin:
    """The part of a `Cluster` that is about machines."""

    _runtime: Runtime

    async def nodes(self) -> list[NodeInfo]:
        """The machines of the cluster."""
        reply = await self._runtime.link.request(ListNodes())
        assert isinstance(reply, Nodes)
        return list(reply.nodes)

    async def wait_for_nodes(self, count: int, timeout: float = 60.0) -> list[NodeInfo]:
        """Wait until ``count`` machines are there.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds.
        """
        with trio.move_on_after(timeout):
            while len(alive := [node for node in await self.nodes() if node.alive]) < count:  # noqa: ASYNC110
                await trio.sleep(LOOK_EVERY_S)
            return alive
        raise DeadlineExceeded(f"the cluster has fewer than {count} nodes after {timeout:g} s")

    async def list_machines(self, group: str = "") -> Machines:
        """Machines that can be had: each group with what is wanted, asked for, seen and joined, and its units.

        Args:
            group: this one alone.

        Raises:
            InvalidRequest: there is no such group.
        """
        reply = await self._runtime.link.request(ListMachines(group=group))
        assert isinstance(reply, Machines)
        return reply

    async def scale_group(self, group: str, *, min: int | None = None, max: int | None = None) -> None:
        """Set what a group has at least and at most, over its policy, until it is set again. Units beyond ``max`` close
        for new work, and go when they are empty. None: as in the policy.

        Raises:
            InvalidRequest: no such group, or ``min`` is above ``max``.
            Unauthorized: this is a job.
        """
        await self._runtime.link.request(ScaleGroup(group=group, min=min, max=max))

    async def cordon(self, *nodes: str, reason: str = "") -> NodesMarked:
        """Place nothing new on these machines, until `uncordon`; what runs there goes on.

        All hosts of a TPU slice are one unit: one of them means all, and the answer says so. It outlives restarts of
        the controller and of the machines.

        Args:
            reason: for those who wonder why; shown by `nodes`, ``fray nodes`` and `explain`.

        Raises:
            InvalidRequest: there is no such machine; nothing was done.
        """
        return await self._mark(CordonNodes(nodes=nodes, reason=reason))

    async def uncordon(self, *nodes: str) -> NodesMarked:
        """Use these machines again: neither cordoned nor drained any more, nor in quarantine. What a drain has asked to
        end ends all the same.

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
        """Cordon these machines, and end what runs there, to begin elsewhere.

        Jobs end as preempted (their budget for preemption pays), gangs as a whole, each by its ladder; actors begin
        anew by their own rules. Units as in `cordon`.

        Args:
            let_finish: leave jobs alone that may end by themselves; actors go at once.
            deadline_s: for so long; says ``let_finish`` too. Default 3600 with it; 0: at once.
            wait: return when nothing is left there; bound it with a cancel scope.

        Raises:
            InvalidRequest: there is no such machine, or the deadline is no time; nothing was done.
        """
        finish_s = deadline_s if deadline_s is not None else FINISH_S if let_finish else 0.0
        if not 0 <= finish_s < float("inf"):
            raise InvalidRequest(f"deadline_s={finish_s} must be 0 or more seconds")
        marked = await self._mark(CordonNodes(nodes=nodes, reason=reason, drain=True, finish_s=finish_s))
        return await self._wait_drained(marked) if wait else marked

    async def what_if(self, request: JobRequest) -> Forecast:
        """What would become of this request now: would it start, and where; wait, and for what; or never run here?

        Nothing is launched and nothing changes. It needs no entrypoint.

        Raises:
            InvalidRequest: something in the request cannot be.
        """
        reply = await self._runtime.link.request(WhatIf(job=build_forecast_spec(request, self._runtime)))
        assert isinstance(reply, Forecast)
        return reply

    async def _wait_drained(self, marked: NodesMarked) -> NodesMarked:
        """Machines that leave the list, or whose drain somebody else has taken back, are waited for no longer."""
        names = {node.name for node in marked.nodes}
        while True:
            found = [node for node in await self.nodes() if node.name in names]
            if not any(node.standing == "draining" for node in found):
                return NodesMarked(nodes=tuple(found), notes=marked.notes)
            await trio.sleep(LOOK_EVERY_S)

    async def _mark(self, asked: CordonNodes | UncordonNodes) -> NodesMarked:
        reply = await self._runtime.link.request(asked)
        assert isinstance(reply, NodesMarked)
        return reply
