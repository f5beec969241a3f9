"""Jobs for sync code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from fray.api.jobs.job import Job as NativeJob
from fray.blocking.bridge.background_loop import current_runtime, is_in_process, portal_of
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import BlockingContext, Portal
from fray.blocking.logs import LogStream
from fray.errors import NoSuchJob
from fray.missing_names import JOB_LINES, ExplainsMissing, blocking_lines
from fray.model.ids import JobId
from fray.model.specs import JobInfo
from fray.tracebacks import short_tracebacks
from fray.type_variables import T_co

T = TypeVar("T")
STOPPED_WITHIN_S = 1.0
"""Seconds that `terminate` waits for the end of jobs of this process: milliseconds, unless async code cleans up."""


@short_tracebacks
class Job(ExplainsMissing, str, Generic[T_co]):
    """Handle of one job, which returns a ``T_co``. It is a string, the job's id, and may be used as such; picklable:
    wherever it arrives in the cluster it is a handle of the same job.
    """

    _meant = blocking_lines(JOB_LINES)
    _native: NativeJob[T_co]
    _bound_portal: Portal | None

    def __new__(cls, portal: Portal | None, job: NativeJob[T_co]) -> Job[T_co]:
        self = super().__new__(cls, job.id)
        self._bound_portal, self._native = portal, job
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (None, self._native)

    @property
    def _portal(self) -> Portal:
        """Portal of the job's runtime; an unpickled job belongs to the cluster of the code that uses it."""
        if self._bound_portal is None:
            portal = portal_of(current_runtime())
            portal.run(lambda: self._native.info)  # from now on its state is known, on any thread
            self._bound_portal = portal
        return self._bound_portal

    @property
    def _known(self) -> NativeJob[T_co]:
        """Native job with its record, which may be read on any thread. Raises as `_portal`."""
        if self._bound_portal is None:
            _ = self._portal
        return self._native

    @property
    def id(self) -> JobId:
        return self._native.id

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def info(self) -> JobInfo:
        """Latest state known here."""
        return self._known.info

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result of the callable (None for a program), once the job has ended.

        Args:
            timeout: seconds until TimeoutError; the job continues. Default: no limit.

        Raises:
            BaseException: the callable's own exception, with the remote traceback as its cause.
            JobFailed: it ended for another reason: killed, exit code, lost machine; JobStopped: it was ended on
                request.
            ConnectionFailed: the connection to the controller has ended.
        """
        self.wait_ended(timeout)
        return self._native.result()

    def wait_ended(self, timeout: float | None = None) -> JobInfo:
        """Wait for the end, however it came. Raises TimeoutError, ConnectionFailed as `wait`."""
        if self.info.state.finished:
            return self.info  # whatever the timeout, and also when the cluster has been closed
        return self._portal.call_within(timeout, f"job {self.id} has not ended", self._native.wait_ended)

    def wait_running(self, timeout: float | None = None) -> JobInfo:
        """Wait until every process of the job runs, or the job has ended. Raises as `wait_ended`."""
        return self._portal.call_within(timeout, f"job {self.id} does not run", self._native.wait_running)

    def wait_port(self, name: str, member: int = 0, timeout: float | None = None) -> str:
        """Return ``host:port`` of a port of the job, once it runs. As `fray.Job.wait_port`.

        ``timeout``: seconds until TimeoutError.
        """
        wait = partial(self._native.wait_port, name, member)
        return self._portal.call_within(timeout, f"job {self.id} does not run", wait)

    def open_forward(self, port: str, local_port: int = 0, *, member: int = 0) -> Forward:
        """Forward a port of the job to this machine: ``with job.open_forward("http") as address``. As
        `fray.open_forward`.
        """
        from fray.api.port_forward import open_forward  # imported here: few programs use it

        return Forward(self._portal, open_forward(self._native, port, local_port, member=member))

    def done(self) -> bool:
        """Return whether the job has ended, as far as is known here. Never waits."""
        return self._known.done()

    def terminate(self, reason: str = "terminated by its owner") -> None:
        """Request the end of the job and of everything below it; returns when the controller has recorded the request.

        In a `local` cluster the job is STOPPED then: its thread cannot be killed and may still run user code, whose
        outcome is ignored. (Async code has a second to clean up.)
        """
        self._portal.call(self._native.terminate, reason)
        wait_stopped(self._portal, self._native.wait_ended)

    def logs(self, **which: Any) -> LogStream:
        """Return a reader of its output: ``for line in job.logs(follow=True)``. As `fray.Cluster.logs`."""
        return LogStream(self._portal, self._portal.run(lambda: self._native.logs(**which)))

    stacks = make_blocking(NativeJob.stacks)

    def __repr__(self) -> str:
        return repr(self._native)

    def _repr_html_(self) -> str:
        return self._native._repr_html_()


class Forward:
    """Local address that forwards to a port of a job, while the ``with`` is open."""

    def __init__(self, portal: Portal, manager: AbstractAsyncContextManager[str]) -> None:
        self._context: BlockingContext[str] = BlockingContext(portal, manager)

    def __enter__(self) -> str:
        return self._context.enter(around_body=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.leave(None)


def wait_stopped(portal: Portal, wait: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Wait, after a request to end jobs, until they have ended, if they are in this process: that takes
    milliseconds.
    """
    if is_in_process(portal.runtime):
        with suppress(TimeoutError, NoSuchJob):
            portal.call_within(STOPPED_WITHIN_S, "it has not ended", wait)


def launch_result(portal: Portal, launched: Any) -> Job | list[Job]:
    """Return the result of a native ``launch`` for sync code."""
    return job_list(portal, launched) if isinstance(launched, list) else Job(portal, launched)


def job_list(portal: Portal, jobs: Sequence[NativeJob[T]]) -> list[Job[T]]:
    """Return the jobs for sync code."""
    return [Job(portal, job) for job in jobs]
