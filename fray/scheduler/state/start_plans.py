"""Where and when an applicant starts at the latest (see `backfill`)."""

from __future__ import annotations

from attrs import Factory, frozen

from fray.model.ids import JobId
from fray.scheduler.pool.requests import Shares


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
