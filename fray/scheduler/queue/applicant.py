"""An applicant (something that waits for machines) and its shape (what decides whether it fits)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

from attrs import Factory, frozen

from fray.model.ids import JobId, NodeName
from fray.model.policy.priority import Band
from fray.scheduler.pool.requests import PlacementRequest, Shares
from fray.scheduler.queue.fair_share import Tenant

Entry: TypeAlias = tuple[int, int, int, str]
"""(rank of the band, less priority, order of acceptance, id)"""
NO_TENANT = Tenant()
NEVER = float("inf")
"""Since when those wait who cannot starve."""


class ApplicantKind(StrEnum):
    """What an applicant is, and so who is told of its places (`placement.STARTERS`)."""

    JOB = "job"
    GROUP = "group"
    """A job group: all its jobs at once."""
    RESERVATION = "reservation"
    """The minimum of a reservation."""
    GROWTH = "growth"
    """One unit more of a reservation."""


@frozen(cache_hash=True)
class PlacementShape:
    """What decides whether an applicant fits."""

    request: PlacementRequest
    is_child: bool = False
    """Launched by a running job, and so part of it: never held back for a starving one."""
    reservation: str = ""
    """Whose machines it takes; empty: those of the fleet."""
    is_growth: bool = False
    """It is one of a reservation, which stands behind everybody else."""


@frozen
class Applicant:
    """Something that waits for machines."""

    id: str
    """Of the job, the group, or the reservation (growth has a mark behind it)."""
    shape: PlacementShape
    order: int
    """Of acceptance."""
    waiting_since: float
    """When it began to wait, by the law's time."""
    kind: ApplicantKind = ApplicantKind.JOB
    band: Band = Band.INTERACTIVE
    tenant: Tenant = NO_TENANT
    time_limit_s: float | None = None
    """It is known to be over so long after its start."""
    priority: int = 0
    """Among those of its tenant and band: higher goes first."""

    @property
    def entry(self) -> Entry:
        """Its place among those of its tenant."""
        return self.band.rank, -self.priority, self.order, self.id


@frozen(eq=False)
class HeldMachines:
    """Machines that are kept for one applicant, altogether or in part."""

    reservation: str
    """Whose machines they are; empty: the fleet's."""
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
