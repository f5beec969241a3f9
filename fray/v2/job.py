"""Jobs as callers of `fray.v2` see them: handles, errors, and waiting for many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction
from math import isnan
from time import monotonic, sleep
from typing import Any, Protocol, runtime_checkable

from fray.model.text import list_text
from fray.v2.types import JobStatus as JobStatus


@runtime_checkable
class JobHandle(Protocol):
    """A job that was submitted."""

    @property
    def job_id(self) -> str:
        """Unique; has the job's name in it."""

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait for its end.

        Args:
            timeout: seconds. Default None: no end.
            raise_on_failure: raise what it failed with; else FAILED, and when it is late the present status.

        Raises:
            BaseException: the job's own exception.
            TimeoutError: it has not ended within ``timeout``.
        """

    def status(self) -> JobStatus:
        """How it stands."""

    def terminate(self) -> None:
        """End it; it is STOPPED at once. May be repeated."""

    def logs(self) -> str:
        """What it has printed."""


class JobFailed(RuntimeError):
    """A job failed or was stopped. ``job_id`` says which, ``failed_status`` how it stands."""

    def __init__(self, job_id: str, failed_status: JobStatus) -> None:
        super().__init__(f"job {job_id} {failed_status.value}")
        self.job_id, self.failed_status = job_id, failed_status

    def __reduce__(self) -> tuple[Any, ...]:
        return JobFailed, (self.job_id, self.failed_status)


class JobAlreadyExists(RuntimeError):
    """A living job has this name. ``handle`` leads to it, if it could be found."""

    def __init__(self, job_name: str, handle: JobHandle | None = None) -> None:
        super().__init__(f"a job named {job_name!r} exists already: pass adopt_existing=True to go on with it")
        self.job_name, self.handle = job_name, handle

    def __reduce__(self) -> tuple[Any, ...]:
        return JobAlreadyExists, (self.job_name, self.handle)


def refuse_async(fn: Any, what: str) -> None:
    """Where no loop is: called there it would do nothing, and that would pass for a success. Raises ValueError."""
    if iscoroutinefunction(fn) or isasyncgenfunction(fn):
        raise ValueError(
            f"{what} is async, and there is no loop to run it in: make it sync, or use FrayClient (in this process: "
            "FrayClient('local')), where async code runs on Trio"
        )


FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.05
"""How soon `wait_all` looks again: after the first, then twice as long each time, up to the last."""


def wait_all(
    jobs: Iterable[JobHandle], *, timeout: float | None = None, raise_on_failure: bool = True
) -> list[JobStatus]:
    """Wait for the end of all jobs, watching all at once; their statuses, in the order given.

    It asks nothing but ``status()`` and ``job_id`` of them.

    Args:
        timeout: seconds. Default None: no end.
        raise_on_failure: raise for the first that fails or is stopped, without waiting for the rest.

    Raises:
        JobFailed: one of them failed, or was stopped.
        TimeoutError: not all have ended within ``timeout``.
        ValueError: ``timeout`` is not a number, which nothing is later than.
    """
    if timeout is not None and isnan(timeout):
        raise ValueError(f"timeout={timeout} must be seconds, or None to wait without end")
    jobs = list(jobs)
    until = None if timeout is None else monotonic() + timeout
    ended: dict[int, JobStatus] = {}
    pause = FIRST_LOOK_S
    while True:
        for index, job in enumerate(jobs):
            if index not in ended and JobStatus.finished(status := job.status()):
                ended[index] = status
                if raise_on_failure and status != JobStatus.SUCCEEDED:
                    raise JobFailed(job.job_id, status)
        if len(ended) == len(jobs):
            return [ended[index] for index in range(len(jobs))]
        if pause == FIRST_LOOK_S:
            _check_may_wait(jobs)
        left = None if until is None else until - monotonic()
        if left is not None and left <= 0:
            late = [job.job_id for index, job in enumerate(jobs) if index not in ended]
            raise TimeoutError(
                f"{len(late)} of {len(jobs)} jobs have not ended within {timeout:g} s: {list_text(late, 3)}"
            )
        sleep(pause if left is None else min(pause, left))
        pause = min(2 * pause, LAST_LOOK_S)


def _check_may_wait(jobs: Sequence[JobHandle]) -> None:
    """Handles that hear of their jobs by a loop may have a say: in that loop's thread they would never hear of them."""
    for job in jobs:
        if (check := getattr(job, "_check_may_wait", None)) is not None:
            check()
