"""Health checks of jobs, and the progress they report."""

from __future__ import annotations

from enum import StrEnum

from fray.errors import InvalidRequest
from fray.model.frozen import frozen

PERIOD_LEAST_S = 0.01
PATH_LIMIT_CHARS = 2_000


@frozen
class HealthCheck:
    """Periodic health check of a job, which fails after ``failures`` missing or bad answers in a row.

    Attributes:
        path: HTTP path requested with GET on the port named ``port``; any status from 200 to 399 is good.
        actor: method of the actor that is called without arguments; any return is good.
        port: one of the job's ``ports``. Default ``"http"``.
        period_s: seconds between two checks, and the longest wait for an answer. Default 10.
        failures: failed checks in a row after which the job fails. Default 3.
        start_s: seconds after its start in which failures do not count, until the first good answer. Default 60.

    Raises:
        InvalidRequest: both or neither of ``path`` and ``actor``; an invalid number.
    """

    path: str | None = None
    actor: str | None = None
    port: str = "http"
    period_s: float = 10.0
    failures: int = 3
    start_s: float = 60.0

    def __attrs_post_init__(self) -> None:
        if (self.path is None) == (self.actor is None):
            raise InvalidRequest("HealthCheck needs either path='/healthz' or actor='method'")
        if self.path is not None and not self.path.startswith("/"):
            raise InvalidRequest(f"HealthCheck(path={self.path!r}) must begin with a slash: '/{self.path}'")
        if self.path is not None and not (self.path.isprintable() and self.path.isascii() and " " not in self.path):
            raise InvalidRequest(f"HealthCheck(path={self.path!r}) must be URL-encoded (spaces as %20)")
        if self.path is not None and len(self.path) > PATH_LIMIT_CHARS:
            raise InvalidRequest(f"HealthCheck: its path has more than {PATH_LIMIT_CHARS:,} characters")
        if not (PERIOD_LEAST_S <= self.period_s < float("inf") and self.failures >= 1 and self.start_s >= 0):
            raise InvalidRequest(
                f"{self}: period_s must be {PERIOD_LEAST_S} seconds or more, failures 1 or more, start_s 0 or more"
            )


class OnStall(StrEnum):
    """Reaction to a job that has reported no progress for ``stall_s``."""

    CAPTURE = "capture"
    """Save the stacks of all its threads in its record, once per stall."""
    RESTART = "restart"
    """Save the stacks, then end the attempt as a failure; the failure budget decides about a retry."""


@frozen(kw_only=True)
class Progress:
    """Progress that a job last reported with `fray.progress`."""

    done: float
    total: float | None = None
    unit: str = ""
    time: float = 0.0
    """Time of the report, in seconds since the epoch."""
