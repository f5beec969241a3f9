"""Applicants, which wait for machines; their shapes, which decide whether they fit; and what is held for them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

from attrs import Factory, field, frozen

from fray.model.ids import JobId, NodeName
from fray.model.policy.priority import Band
from fray.scheduler.pool.requests import PlacementRequest, Shares
from fray.scheduler.queue.fair_share import Tenant

Entry: TypeAlias = tuple[int, int, int, str]
"""(rank of the band, negative priority, order of acceptance, id)"""
NO_TENANT = Tenant()
NEVER = float("inf")
"""Start of the wait of applicants that cannot starve."""


class ApplicantKind(StrEnum):
    """Kind of an applicant, which decides how its places are used (`placement.STARTERS`)."""

    JOB = "job"
    GROUP = "group"
    """A job group: all its jobs at once."""
    RESERVATION = "reservation"
    """The minimum of a reservation."""
    GROWTH = "growth"
    """One more unit of a reservation."""


# A key of many dictionaries in each pass: the hash of its nested demands is computed once.
@frozen(cache_hash=True)
class PlacementShape:
    """Everything that decides whether an applicant fits."""

    request: PlacementRequest
    # Children pass holds that bind other applicants of the same demand, so they are a shape of their own.
    is_child: bool = False
    """True if a running job or its attempt owns it: never held back for a starving applicant."""
    reservation: str = ""
    """Reservation whose machines it takes; empty for the cluster's."""
    # In the shape, so that a refusal of growth, which is tried last and may not reclaim surplus units, does not count
    # for jobs of the same demand.
    is_growth: bool = False
    """True if it is one more unit of a reservation, which comes after everything else."""


@frozen
class Applicant:
    """Job, job group or reservation that waits for machines."""

    id: str
    """Id of the job or group, or of the reservation with a prefix."""
    shape: PlacementShape
    order: int
    """Order of acceptance."""
    waiting_since: float
    """Time at which it began to wait, by the scheduler's clock."""
    kind: ApplicantKind = ApplicantKind.JOB
    band: Band = Band.INTERACTIVE
    tenant: Tenant = NO_TENANT
    time_limit_s: float | None = None
    """Seconds after its start within which it surely ends, without its termination."""
    owner: str = ""
    """Attempt or job that owns the job; empty for those of a driver and detached ones."""
    priority: int = 0
    """Priority among the applicants of its tenant and band, higher first."""

    entry: Entry = field(init=False, eq=False, repr=False)
    """Sort key among the applicants of its tenant."""

    @entry.default
    def _sort_key(self) -> Entry:
        # The id makes entries unique, so that sorted pairs of an entry and a queue never compare the queues.
        return self.band.rank, -self.priority, self.order, self.id


@frozen(eq=False)
class HeldMachines:
    """Machines held for one applicant, entirely or in part."""

    reservation: str
    """Reservation whose machines they are; empty for the cluster's."""
    nodes: Mapping[NodeName, None]


@frozen(eq=False)
class StartPlan:
    """The latest start of an applicant, and the machines it starts on (see `backfill`).

    Attributes:
        machines: number of open machines when it was made.
        at: by the scheduler's clock; None if the time limits of what runs do not give a time: no machine is held then.
        shares: what it takes of each machine.
        after: known jobs whose ends make it fit.
    """

    applicant: str
    made_at: float
    machines: int
    at: float | None = None
    shares: Shares = Factory(dict)
    after: tuple[JobId, ...] = ()
