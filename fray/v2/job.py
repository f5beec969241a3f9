"""Jobs as callers of `fray.v2` see them: handles, errors, and `wait_all`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction
from math import isnan
from time import monotonic, sleep
from typing import Any, Protocol, overload, runtime_checkable

from fray.model.text import list_text
from fray.v2.types import JobStatus as JobStatus


@runtime_checkable
class JobHandle(Protocol):
    """Submitted job."""

    @property
    def job_id(self) -> str:
        """Unique id, which contains the job's name."""

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait until the job has ended.

        Args:
            timeout: seconds. Default None: without limit.
            raise_on_failure: raise the job's error. If False, return FAILED, and the present status at a timeout.

        Raises:
            BaseException: the job's own exception.
            TimeoutError: the job has not ended within ``timeout``.
        """

    def status(self) -> JobStatus:
        """Return the current status."""

    def terminate(self) -> None:
        """End the job; its status is STOPPED at once. May be repeated."""

    @overload
    def logs(self) -> str: ...

    @overload
    def logs(self, max_lines: int) -> tuple[str, ...]: ...

    def logs(self, max_lines: int | None = None) -> Any:
        """Return the output of the job so far: a text, or with ``max_lines`` a tuple of that many last lines (0: all).
        In Marin's flat modules the default is 0."""


def output_of(lines: Iterable[str], max_lines: int | None) -> str | tuple[str, ...]:
    """Return lines as `JobHandle.logs` does."""
    if max_lines is None:
        return "".join(f"{line}\n" for line in lines)
    return tuple(lines)[-max_lines:]


class JobFailed(RuntimeError):
    """A job failed or was stopped: ``job_id``, with the status ``failed_status``."""

    def __init__(self, job_id: str, status: JobStatus) -> None:
        super().__init__(f"job {job_id} {status.value}")
        self.job_id, self.failed_status = job_id, status

    def __reduce__(self) -> tuple[Any, ...]:
        return JobFailed, (self.job_id, self.failed_status)


class JobAlreadyExists(RuntimeError):
    """A living job has this name. ``handle`` refers to it; None if it could not be found."""

    def __init__(self, job_name: str, handle: JobHandle | None = None) -> None:
        super().__init__(f"a job named {job_name!r} exists already: pass adopt_existing=True to use that job")
        self.job_name, self.handle = job_name, handle

    def __reduce__(self) -> tuple[Any, ...]:
        return JobAlreadyExists, (self.job_name, self.handle)


def refuse_async(fn: Any, what: str) -> None:
    """Raise ValueError if ``fn`` is async, for backends without a loop: there its call would do nothing and succeed."""
    if iscoroutinefunction(fn) or isasyncgenfunction(fn):
        raise ValueError(
            f"{what} is async, and there is no loop to run it in: make it sync, or use FrayClient (in this process: "
            "FrayClient('local')), where async code runs on Trio"
        )


FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.05
"""Seconds between two looks of `wait_all`: the first pause, doubled each time up to the last."""


def wait_all(
    jobs: Iterable[JobHandle], *, timeout: float | None = None, raise_on_failure: bool = True
) -> list[JobStatus]:
    """Wait until all jobs have ended; return their statuses, in the order given.

    It polls, and uses ``status()`` and ``job_id`` only, so that it works on handles of any backend and on a caller's
    own.

    Args:
        timeout: seconds. Default None: without limit.
        raise_on_failure: raise at the first job that fails or is stopped, without waiting for the rest.

    Raises:
        JobFailed: a job failed, or was stopped.
        TimeoutError: not all have ended within ``timeout``.
        ValueError: ``timeout`` is not a number (NaN).
    """
    if timeout is not None and isnan(timeout):
        raise ValueError(f"timeout={timeout} must be seconds, or None to wait without limit")
    jobs = list(jobs)
    until = None if timeout is None else monotonic() + timeout
    ended: dict[int, JobStatus] = {}
    pause = FIRST_LOOK_S
    # Late, as handles of other backends need none of it: a job of Fray that waits for its jobs lends them its CPUs.
    from fray.blocking.bridge.portal import waits

    with waits.waiting():
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
    """Raise BlockingNotAllowed in the thread of a loop that would report the end of the jobs: it would never arrive."""
    for job in jobs:
        if (check := getattr(job, "_check_may_wait", None)) is not None:
            check()
