"""Jobs for sync code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from fray.api.jobs.job import Job as NativeJob
from fray.blocking.bridge.background_loop import current_runtime, is_in_process, portal_of
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.bridge.portal import BlockingContext, Portal
from fray.blocking.logs import LogStream
from fray.errors import NoSuchJob
from fray.model.ids import JobId
from fray.model.specs import JobInfo

STOPPED_WITHIN_S = 1.0
"""How long `terminate` waits for the end of what runs in this process: a moment, unless async code cleans up."""


class Job(str):
    """One job of the cluster, seen from here. It is its id, a string, and may stand wherever an id does; picklable:
    it means the same job wherever it arrives in the cluster."""

    _native: NativeJob
    _place: Portal | None

    def __new__(cls, portal: Portal | None, job: NativeJob) -> Job:
        self = super().__new__(cls, job.id)
        self._place, self._native = portal, job
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Job, (None, self._native)

    @property
    def _portal(self) -> Portal:
        """A job that came by pickle belongs to the cluster of the code that uses it."""
        if self._place is None:
            place = portal_of(current_runtime())
            place.run(lambda: self._native.info)  # from here on it is known, to any thread
            self._place = place
        return self._place

    @property
    def _known(self) -> NativeJob:
        """It, for what is read of it on any thread. Raises as `_portal`."""
        if self._place is None:
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
        """The latest state known here."""
        return self._known.info

    def wait(self, timeout: float | None = None) -> Any:
        """What the callable returned (None for a program).

        Args:
            timeout: seconds; after them TimeoutError, and the job runs on. Default: no end.

        Raises:
            BaseException: the callable's own exception, with the remote traceback as its cause.
            JobFailed: it ended for another reason: killed, exit code, lost machine; JobStopped: somebody ended it.
            ConnectionFailed: the conversation with the controller has ended.
        """
        self.wait_ended(timeout)
        return self._native.result()

    def wait_ended(self, timeout: float | None = None) -> JobInfo:
        """Wait for the end, whatever it is. Raises TimeoutError, ConnectionFailed as `wait`."""
        if self.info.state.finished:
            return self.info  # no time is too short to say so, and it is so also when the cluster has been closed
        return self._portal.call_within(timeout, f"job {self.id} has not ended", self._native.wait_ended)

    def wait_running(self, timeout: float | None = None) -> JobInfo:
        """Wait until every process of the job runs, or the job has ended. Raises as `wait_ended`."""
        return self._portal.call_within(timeout, f"job {self.id} does not run", self._native.wait_running)

    def wait_port(self, name: str, member: int = 0, timeout: float | None = None) -> str:
        """``host:port`` of a port of the job, as soon as it runs. As `fray.Job.wait_port`.

        ``timeout``: seconds; after them TimeoutError.
        """
        wait = partial(self._native.wait_port, name, member)
        return self._portal.call_within(timeout, f"job {self.id} does not run", wait)

    def open_forward(self, port: str, local_port: int = 0, *, member: int = 0) -> Forward:
        """``with job.open_forward("http") as address``: a port of the job as a port of this machine. As
        `fray.open_forward`."""
        from fray.api.port_forward import open_forward  # not every program needs it

        return Forward(self._portal, open_forward(self._native, port, local_port, member=member))

    def done(self) -> bool:
        """Whether it has ended, as far as is known here. It never waits."""
        return self._known.done()

    def terminate(self, reason: str = "terminated by its owner") -> None:
        """Ask for its end and that of everything below it; returns when the controller has noted it.

        In a `local` cluster it has STOPPED then: its thread cannot be ended and may still be in user code, but what
        comes of that is nobody's any more. (Async code has a second to clean up.)
        """
        self._portal.call(self._native.terminate, reason)
        wait_stopped(self._portal, self._native.wait_ended)

    def logs(self, **which: Any) -> LogStream:
        """What it has printed: ``for line in job.logs(follow=True)``. As `fray.Cluster.logs`."""
        return LogStream(self._portal, self._portal.run(lambda: self._native.logs(**which)))

    stacks = make_blocking(NativeJob.stacks)

    def __repr__(self) -> str:
        return repr(self._native)


class Forward:
    """An address here that leads to a port of a job, while the ``with`` is open."""

    def __init__(self, portal: Portal, manager: AbstractAsyncContextManager[str]) -> None:
        self._held: BlockingContext[str] = BlockingContext(portal, manager)

    def __enter__(self) -> str:
        return self._held.enter(around_body=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.leave(None)


def wait_stopped(portal: Portal, wait: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """After a request to end: in this process that is done at once, and seen here a moment later."""
    if is_in_process(portal.runtime):
        with suppress(TimeoutError, NoSuchJob):
            portal.call_within(STOPPED_WITHIN_S, "it has not ended", wait)


def launched(portal: Portal, launched: Any) -> Job | list[Job]:
    """What a native ``launch`` gave, for sync code."""
    return job_list(portal, launched) if isinstance(launched, list) else Job(portal, launched)


def job_list(portal: Portal, jobs: Sequence[NativeJob]) -> list[Job]:
    """Return the jobs for sync code."""
    return [Job(portal, job) for job in jobs]
