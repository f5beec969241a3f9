"""How a job is asked whether it is well, and what it says of its progress."""

from __future__ import annotations

from enum import StrEnum

from fray.errors import InvalidRequest
from fray.model.frozen import frozen

PERIOD_LEAST_S = 0.01
PATH_LIMIT_CHARS = 2_000


@frozen
class HealthCheck:
    """Ask the job again and again; it has failed once ``failures`` answers in a row are missing or bad.

    Attributes:
        path: HTTP path asked for with GET on the port named ``port``; any answer from 200 to 399 is good.
        actor: method of the actor that is called without arguments; any return is good.
        port: one of the job's ``ports``. Default ``"http"``.
        period_s: seconds between two questions, and the longest wait for an answer. Default 10.
        failures: in a row. Default 3.
        start_s: how long after its start no failure counts unless it has been well before. Default 60.

    Raises:
        InvalidRequest: both or neither of ``path`` and ``actor``; an impossible amount.
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
            raise InvalidRequest(f"HealthCheck(path={self.path!r}): write it as it stands in a URL, blanks as %20")
        if self.path is not None and len(self.path) > PATH_LIMIT_CHARS:
            raise InvalidRequest(f"HealthCheck: its path has more than {PATH_LIMIT_CHARS:,} characters")
        if not (PERIOD_LEAST_S <= self.period_s < float("inf") and self.failures >= 1 and self.start_s >= 0):
            raise InvalidRequest(
                f"{self}: period_s must be {PERIOD_LEAST_S} seconds or more, failures 1 or more, start_s 0 or more"
            )


class OnStall(StrEnum):
    """What happens to a job that has told no progress for ``stall_s``."""

    CAPTURE = "capture"
    """The stacks of all its threads go into its record, once a stall."""
    RESTART = "restart"
    """That, and the attempt ends as a failure; the budget for failures says what follows."""


@frozen(kw_only=True)
class Progress:
    """What a job last said by `fray.progress`."""

    done: float
    total: float | None = None
    unit: str = ""
    time: float = 0.0
    """When, in seconds since the epoch."""
