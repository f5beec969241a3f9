"""Jobs of `FrayClient`: handles by job id, and the wrapper in which their functions run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

from attrs import evolve

from fray.blocking import Cluster, Job
from fray.blocking.bridge.portal import refuse_in_loop
from fray.errors import ConnectionFailed, NoSuchJob, failures_in
from fray.errors import JobFailed as NativeJobFailed
from fray.model.requests import Entrypoint, JobRequest
from fray.tracebacks import short_tracebacks
from fray.v2.fray import convert
from fray.v2.fray.current_cluster import cluster_here
from fray.v2.interface import _current_client_var
from fray.v2.job import JobFailed, output_of
from fray.v2.types import JobStatus


@short_tracebacks
class FrayJobHandle:
    """Job on a cluster of Fray; picklable. See `fray.v2.JobHandle`.

    Args:
        job: the job, if it is at hand; otherwise it is looked up at the first use.
        argv: command line, if the job is a program.
    """

    def __init__(self, job_id: str, *, job: Job | None = None, argv: tuple[str, ...] = ()) -> None:
        self._job_id, self._argv = job_id, argv
        self._job = job
        self._stopped = False

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        """Return the status as this process has heard it; only the first call sends a request. STOPPED after
        `terminate`.

        Raises:
            RuntimeError: the connection to the cluster has ended before the job, the cluster no longer has the job, or
                this process was forked since and hears nothing.
        """
        if self._stopped:
            return JobStatus.STOPPED
        job = self._job or self._look_up()
        state = job.info.state
        if job.done() and not state.finished:
            raise RuntimeError(f"the status of job {self._job_id} is no longer known: {job._native.exception()}")
        if not state.finished:
            # In a forked child the record never changes, so a loop over `status` would not end.
            job._portal.check_here()
        return convert.status(state)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait until the job has ended, also after `terminate`. See `fray.v2.JobHandle.wait`.

        Raises:
            BaseException: the job's own exception.
            subprocess.CalledProcessError: the program's exit code is not 0, or a signal ended it.
            JobFailed: (a RuntimeError) the job failed otherwise; the cause has the details.
            TimeoutError: the job has not ended within ``timeout`` seconds.
            RuntimeError: as `status`.
        """
        job = self._job or self._look_up()
        try:
            job.wait_ended(timeout)
        except TimeoutError:
            # As the interface has it: without raising, the caller reads the status.
            if raise_on_failure:
                raise
        found = self.status()
        if found == JobStatus.FAILED and raise_on_failure:
            self._raise_failure(job)
        return found

    def _check_may_wait(self) -> None:
        refuse_in_loop("wait_all waits")

    def _raise_failure(self, job: Job) -> None:
        try:
            job.wait()
        except NativeJobFailed as failed:
            if failed.details.get("job_id") != self._job_id:
                raise  # the job itself raised it: it waited for another job
            code, signal = failed.details.get("exit_code"), failed.details.get("signal")
            if self._argv and (code or signal):
                raise CalledProcessError(code or -int(signal or 0), list(self._argv)) from failed
            raised = JobFailed(self._job_id, JobStatus.FAILED)
            raised.add_note(str(failed))
            raise raised from failed
        except BaseException as error:
            _remove_own_notes(error, self._job_id)
            raise

    def terminate(self) -> None:
        """End the job with everything it has launched; return when the cluster has the request. The status is STOPPED
        from now on."""
        # First: the status is STOPPED also if the request fails or the job has ended meanwhile.
        self._stopped = True
        try:
            job = self._job or self._look_up()
            if not job.done():
                job.terminate()
        except ConnectionFailed:
            pass  # the job has ended with the connection

    @property
    def has_ended(self) -> bool:
        """True once this process has heard of the job's end."""
        return self._job is not None and self._job.done()

    def mark_stopped(self) -> None:
        """Set the status to STOPPED: the job is being ended."""
        self._stopped = True

    def logs(self, max_lines: int | None = None) -> Any:
        """Return the output so far, of all attempts. See `fray.v2.JobHandle.logs`. Raises RuntimeError: the client is
        closed."""
        lines = (self._job or self._look_up()).logs()
        # Without Fray's own lines, as callers compare the text with what they printed.
        return output_of((line.text for line in lines if line.stream in ("out", "err")), max_lines)

    def bind(self, cluster: Cluster) -> FrayJobHandle:
        """Look up the job on this cluster. Raises RuntimeError: the cluster does not have the job, or no longer."""
        try:
            (self._job,) = cluster.follow_jobs([self._job_id])
        except NoSuchJob as gone:
            raise RuntimeError(f"job {self._job_id}: {gone}") from gone
        return self

    def _look_up(self) -> Job:
        self.bind(cluster_here(f"job {self._job_id}"))
        assert self._job is not None
        return self._job

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._job_id, self._argv, self._stopped)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrayJobHandle) and other._job_id == self._job_id

    def __hash__(self) -> int:
        return hash(self._job_id)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else self._job.info.state.value if self._job is not None else "elsewhere"
        return f"<FrayJobHandle {self._job_id} {state}>"


def _unpickled(job_id: str, argv: tuple[str, ...], stopped: bool) -> FrayJobHandle:
    handle = FrayJobHandle(job_id, argv=argv)
    handle._stopped = stopped
    return handle


def _remove_own_notes(error: BaseException, job_id: str) -> None:
    """Remove the notes that Fray has added to a caller's exception: callers' tests compare its text."""
    for each in failures_in(error):
        notes = getattr(each, "__notes__", [])
        ours = [index for index, note in enumerate(notes) if note.startswith(f"raised in job {job_id}")]
        if ours:
            del notes[ours[0] :]


class JobFunction:
    """Function as a job's process runs it: with the job's client as current client, and its return value dropped.

    Callers of `fray.v2` never read return values, and a value that cannot be pickled, or has 100 MB, must not fail the
    job. The wrapper has the module and name of the function, so that two submits of one function are the same request.

    Args:
        find_client: returns the client of the job whose code is running. It travels along by name: the client imports
            this module, so this module cannot import it.
    """

    def __init__(self, fn: Callable[..., Any], find_client: Callable[[], Any]) -> None:
        self.fn, self._find_client = fn, find_client
        self.__module__ = getattr(fn, "__module__", "") or ""
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        token = _current_client_var.set(self._find_client())
        try:
            self.fn(*args, **kwargs)
        finally:
            _current_client_var.reset(token)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobFunction, (self.fn, self._find_client)


def with_client(request: JobRequest, find_client: Callable[[], Any]) -> JobRequest:
    """Return the request with its function as a `JobFunction`; an async function and a program stay as they are."""
    entry = request.entrypoint
    if entry is None or entry.callable is None or _is_async(entry.callable):
        return request
    fn = JobFunction(entry.callable, find_client)
    return evolve(request, entrypoint=Entrypoint.from_callable(fn, entry.args, entry.kwargs))


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
