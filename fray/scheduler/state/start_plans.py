"""Where and when an applicant starts at the latest (see `backfill`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import Factory, frozen

from fray.model.ids import JobId, NodeName
from fray.model.resources import Demand

Shares: TypeAlias = Mapping[NodeName, tuple[tuple[Demand, int], ...]]
"""By machine: demands, and how many members of each."""


@frozen(eq=False)
class StartPlan:
    """Where and when an applicant starts at the latest.

    Attributes:
        at: by the law's time; None: nobody knows, and nothing is kept.
        machines: how many there were to choose from when it was made.
        after: jobs whose end makes it fit, as far as that is known.
    """

    applicant: str
    made_at: float
    machines: int
    at: float | None = None
    shares: Shares = Factory(dict)
    after: tuple[JobId, ...] = ()


@frozen(eq=False)
class HeldMachines:
    """Machines that are kept for one applicant, altogether or in part."""

    reservation: str
    """Whose machines they are; empty: the fleet's."""
    nodes: Mapping[NodeName, None]
