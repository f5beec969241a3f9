"""Messages for maintenance of machines (cordon, drain, uncordon) and for what-if queries."""

from __future__ import annotations

from enum import StrEnum

from fray.model.frozen import frozen
from fray.model.ids import JobId, NodeName
from fray.model.messages.client import NodeInfo
from fray.model.specs import JobSpec


@frozen(kw_only=True)
class CordonNodes:
    """Cordon nodes: place nothing new on them; running jobs continue, unless the nodes are drained.

    All hosts of a TPU slice are one unit: naming one of them means all. Reply: `NodesMarked`, at once. Error:
    InvalidRequest, nothing was done.
    """

    nodes: tuple[NodeName, ...]
    reason: str = ""
    drain: bool = False
    """Also end the jobs there, so that they restart elsewhere."""
    finish_s: float = 0.0
    """Grace for draining: seconds for which jobs that may end by themselves are left running. Actors never are."""


@frozen(kw_only=True)
class UncordonNodes:
    """Return nodes to service: no longer cordoned, drained or quarantined. Reply and error: as `CordonNodes`."""

    nodes: tuple[NodeName, ...]


@frozen(kw_only=True)
class NodesMarked:
    nodes: tuple[NodeInfo, ...]
    """All affected nodes, in their new state."""
    notes: tuple[str, ...] = ()
    """Remarks for the operator."""


class ForecastVerdict(StrEnum):
    """Predicted outcome of a request."""

    NOW = "now"
    WAIT = "wait"
    PREEMPT = "preempt"
    """Other jobs would be ended to free their machines."""
    GROW = "grow"
    """Machines would be requested."""
    NEVER = "never"


@frozen(kw_only=True)
class WhatIf:
    """Forecast the placement of a job without launching it. Reply: `Forecast`. No attachments."""

    job: JobSpec


@frozen(kw_only=True)
class Forecast:
    """Forecast at this moment."""

    verdict: ForecastVerdict
    text: str
    """Explanation in one or more lines."""
    nodes: tuple[NodeName, ...] = ()
    """NOW, PREEMPT: nodes, member by member."""
    place: int = 0
    """WAIT: its position in the queue."""
    preempts: tuple[JobId, ...] = ()
    """PREEMPT: jobs it would end."""
    unblocked_by: tuple[JobId, ...] = ()
    """WAIT: some of the jobs whose end alone would suffice."""
    expected_s: float | None = None
    """WAIT: it would start within so many seconds, by the time limits of the jobs that hold what it needs, if nothing
    ahead of it in the queue takes that. None: unknown."""
    groups: tuple[str, ...] = ()
    """GROW: groups from which machines would be requested."""

    @property
    def starts_now(self) -> bool:
        return self.verdict is ForecastVerdict.NOW
