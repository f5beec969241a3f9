"""What is asked of the controller about its machines: to leave them out, to empty them, to have them again; and what
would become of a request there."""

from __future__ import annotations

from enum import StrEnum

from fray.model.frozen import frozen
from fray.model.ids import JobId, NodeName
from fray.model.messages.client import NodeInfo
from fray.model.specs import JobSpec


@frozen(kw_only=True)
class CordonNodes:
    """Place nothing new on these machines; what runs there goes on, unless they are drained. All hosts of a TPU slice
    are one unit: one of them means all. Reply: `NodesMarked`, at once. Error: InvalidRequest, nothing was done.
    """

    nodes: tuple[NodeName, ...]
    reason: str = ""
    drain: bool = False
    """End what runs there, to begin elsewhere."""
    finish_s: float = 0.0
    """While draining: so long those are left alone that may end by themselves. Actors never do."""


@frozen(kw_only=True)
class UncordonNodes:
    """Use these machines again: neither cordoned nor drained nor in quarantine. Reply and error: as `CordonNodes`."""

    nodes: tuple[NodeName, ...]


@frozen(kw_only=True)
class NodesMarked:
    nodes: tuple[NodeInfo, ...]
    """All that it concerns, as they are now."""
    notes: tuple[str, ...] = ()
    """What is worth a word about it."""


class ForecastVerdict(StrEnum):
    """What would become of a request."""

    NOW = "now"
    WAIT = "wait"
    PREEMPT = "preempt"
    """It would end others to have their machines."""
    GROW = "grow"
    """Machines would be asked for."""
    NEVER = "never"


@frozen(kw_only=True)
class WhatIf:
    """What would become of this job? Nothing is launched and nothing changes. Reply: `Forecast`. No attachments."""

    job: JobSpec


@frozen(kw_only=True)
class Forecast:
    """The answer, as things are at this moment."""

    verdict: ForecastVerdict
    text: str
    """The answer for people, in one or more lines."""
    nodes: tuple[NodeName, ...] = ()
    """NOW, PREEMPT: where, member by member."""
    place: int = 0
    """WAIT: its number in line."""
    preempts: tuple[JobId, ...] = ()
    """PREEMPT: whom it would end."""
    unblocked_by: tuple[JobId, ...] = ()
    """WAIT: jobs each of whose end would be enough by itself; a few of them."""
    expected_s: float | None = None
    """WAIT: it would start within so many seconds, by the run-time limits of those who hold what it needs, if nobody
    before it takes that. None: not known."""
    groups: tuple[str, ...] = ()
    """GROW: groups that would be asked for machines."""

    @property
    def starts_now(self) -> bool:
        return self.verdict is ForecastVerdict.NOW
