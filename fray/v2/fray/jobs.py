"""Jobs of `FrayClient`: handles that know their job by its id, and what their functions run in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

from attrs import evolve

from fray.blocking import Cluster, Job
from fray.blocking.bridge.portal import refuse_in_loop
from fray.errors import ConnectionFailed, NoSuchJob
from fray.errors import JobFailed as NativeJobFailed
from fray.model.requests import Entrypoint, JobRequest
from fray.v2.fray import convert
from fray.v2.fray.current_cluster import cluster_here
from fray.v2.interface import _current_client_var
from fray.v2.job import JobFailed
from fray.v2.types import JobStatus


class FrayJobHandle:
    """A job of a cluster of Fray; picklable. As `fray.v2.JobHandle`.

    Args:
        job: it, where it is known already; else it is asked for when something of it is.
        argv: of a program.
    """

    def __init__(self, job_id: str, *, job: Job | None = None, argv: tuple[str, ...] = ()) -> None:
        self._job_id, self._argv = job_id, argv
        self._job = job
        self._stopped = False

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        """What is known here of it: nobody is asked, but the first time. STOPPED from `terminate` on.

        Raises:
            RuntimeError: the conversation with the cluster has ended before the job, the cluster has forgotten it,
                or this process was forked since, and nothing is heard here.
        """
        if self._stopped:
            return JobStatus.STOPPED
        job = self._job or self._find()
        state = job.info.state
        if job.done() and not state.finished:
            raise RuntimeError(f"nothing is known of job {self._job_id} any more: {_why_lost(job)}")
        if not state.finished:
            job._portal.check_here()
        return convert.status(state)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait for its end, also after `terminate`. As `fray.v2.JobHandle.wait`.

        Raises:
            BaseException: the job's own exception.
            subprocess.CalledProcessError: its program ended with another code than 0, or by a signal.
            JobFailed: (a RuntimeError) it failed otherwise; the cause says how.
            TimeoutError: it has not ended within ``timeout`` seconds.
            RuntimeError: as `status`.
        """
        job = self._job or self._find()
        try:
            job.wait_ended(timeout)
        except TimeoutError:
            if raise_on_failure:
                raise
        found = self.status()
        if found == JobStatus.FAILED and raise_on_failure:
            self._raise(job)
        return found

    def _check_may_wait(self) -> None:
        refuse_in_loop("wait_all waits")

    def _raise(self, job: Job) -> None:
        try:
            job.wait()
        except NativeJobFailed as failed:
            if failed.details.get("job_id") != self._job_id:
                raise  # the job's own: it waited for another
            code, signal = failed.details.get("exit_code"), failed.details.get("signal")
            if self._argv and (code or signal):
                raise CalledProcessError(code or -int(signal or 0), list(self._argv)) from failed
            raised = JobFailed(self._job_id, JobStatus.FAILED)
            raised.add_note(str(failed))
            raise raised from failed
        except BaseException as error:
            _without_our_notes(error, self._job_id)
            raise

    def terminate(self) -> None:
        """End it, with all it has launched; returns when the cluster has been told. It is STOPPED here from now on."""
        self._stopped = True
        try:
            job = self._job or self._find()
            if not job.done():
                job.terminate()
        except ConnectionFailed:
            pass  # and with the conversation what belongs to it

    @property
    def is_over(self) -> bool:
        """There is nothing to wait for, as far as is known here."""
        return self._job is not None and self._job.done()

    def mark_stopped(self) -> None:
        """It is being ended."""
        self._stopped = True

    def logs(self) -> str:
        """What it has printed so far, in all its attempts. Raises RuntimeError: the client is closed."""
        lines = (self._job or self._find()).logs()
        return "".join(f"{line.text}\n" for line in lines if line.stream in ("out", "err"))

    def bind(self, cluster: Cluster) -> FrayJobHandle:
        """Know it as a job of this cluster. Raises RuntimeError: that does not know it (any more)."""
        try:
            (self._job,) = cluster.follow_jobs([self._job_id])
        except NoSuchJob as gone:
            raise RuntimeError(f"job {self._job_id}: {gone}") from gone
        return self

    def _find(self) -> Job:
        self.bind(cluster_here(f"job {self._job_id}"))
        assert self._job is not None
        return self._job

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._job_id, self._argv, self._stopped)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrayJobHandle) and other._job_id == self._job_id

    def __hash__(self) -> int:
        return hash(self._job_id)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else self._job.info.state.value if self._job is not None else "elsewhere"
        return f"<FrayJobHandle {self._job_id} {state}>"


def _arrived(job_id: str, argv: tuple[str, ...], stopped: bool) -> FrayJobHandle:
    handle = FrayJobHandle(job_id, argv=argv)
    handle._stopped = stopped
    return handle


def _without_our_notes(error: BaseException, job_id: str) -> None:
    """An exception of a caller's own has its text and nothing more: their tests compare it."""
    notes = getattr(error, "__notes__", [])
    ours = [index for index, note in enumerate(notes) if note.startswith(f"raised in job {job_id}")]
    if ours:
        del notes[ours[0] :]


def _why_lost(job: Job) -> BaseException | None:
    return job._native.exception()


class JobFunction:
    """Function as a job's process runs it: with the job's client as current client, and its return value dropped.

    It has the module and name of the function, so that two submits of one function are the same request.

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


def submitted(request: JobRequest, find_client: Callable[[], Any]) -> JobRequest:
    """Return the request with its function as a `JobFunction`; an async function and a program stay as they are."""
    entry = request.entrypoint
    if entry is None or entry.callable is None or _is_async(entry.callable):
        return request
    fn = JobFunction(entry.callable, find_client)
    return evolve(request, entrypoint=Entrypoint.from_callable(fn, entry.args, entry.kwargs))


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
