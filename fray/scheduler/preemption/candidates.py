"""Candidate machines of a search for victims, and what a search keeps of them that continues in the next step.

A search may have to examine thousands of jobs, and the controller answers no request meanwhile. So it has a budget for
each step: when that is spent it pauses, and the next step continues where it stopped, with the machines that were found
to help. Those of them that have changed since are examined again, and so is, at the end, whether the chosen jobs may
still be ended. A machine that did not help is not examined a second time, and the cost of a job is that of the time at
which its machine was examined.
"""

from __future__ import annotations

from attrs import Factory, define

from fray.model.ids import AttemptId, JobId, NodeName
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.scheduler.pool.free_capacity import FreeCapacity
from fray.scheduler.preemption.cost import PreemptionUnit
from fray.scheduler.state.indexes import TimedJob

UNLIMITED = 1 << 62


class SearchPaused(Exception):
    """Raised when the budget of a search is spent: the next step continues it."""


@define(eq=False)
class CandidateMachines:
    """A machine, or all hosts of a slice."""

    nodes: tuple[NodeName, ...]
    free: dict[NodeName, FreeCapacity]
    """Free capacity before any job is ended."""
    attempts: dict[NodeName, list[AttemptId]]
    """Attempts on it."""
    units: list[PreemptionUnit]
    """Jobs on it that may be ended, the cheapest first."""
    shares_by_job: dict[JobId, list[tuple[NodeName, Demand, tuple[str, ...]]]]
    """Machine, demand and devices of each attempt on it, which its end frees."""
    runs_held: int = 0
    """Number of members (or slices) it holds as it is."""
    cheapest_units: list[PreemptionUnit] | None = None
    """Cheapest jobs that make room for one more; valid until a job on it is chosen for another site."""
    has_offer: bool = False


@define(eq=False)
class SearchProgress:
    """State of the search for one demand."""

    sites: list[CandidateMachines] = Factory(list)
    """Candidates where the end of some jobs makes room for one more."""
    examined: dict[NodeName, None] = Factory(dict)
    """Machines of all candidates that were examined."""
    count: int = 0
    """Number of these candidates."""
    limit: int = 0
    """Number of them after which the best of them are sought, before more are examined."""
    visited: int = 0
    """Number of jobs that were visited in the order of their costs."""
    position: tuple[Band, TimedJob] | None = None
    """Band and entry (see `Tables.running_by_band`) of the job that was visited last."""


@define(eq=False)
class SearchMemory:
    """State of a search, for an applicant or those like it (see `SearchKey`).

    Attributes:
        budget: jobs that may still be examined in this step.
        work: of this step, see `Queue.work`.
        used_at: time of the last step in which it was continued.
        scope: which of several searches for the same applicant is under way.
    """

    budget: int = UNLIMITED
    work: int = 0
    used_at: float = 0.0
    scope: tuple[object, ...] = ()
    _progress: dict[tuple[object, ...], SearchProgress] = Factory(dict)

    def progress(self, *key: object) -> SearchProgress:
        """Return the state of the search of this key, within the scope."""
        return self._progress.setdefault((self.scope, *key), SearchProgress())

    def count_examined(self, jobs: int) -> None:
        self.budget -= jobs
        self.work += jobs

    def forget(self) -> None:
        """Begin from nothing."""
        self._progress.clear()
