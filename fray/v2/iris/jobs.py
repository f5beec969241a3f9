"""Handles of jobs on Iris."""

from __future__ import annotations

from typing import Any

from fray.v2.iris.convert import iris_connection, map_iris_job_state
from fray.v2.job import JobFailed, JobStatus, output_of

POLL_LIMIT_S = 5.0
"""Longest time between two looks at the state of a job that is waited for; they begin at 0.1 s."""
_NO_LIMIT_S = 10 * 365 * 86_400.0
"""Timeout of a wait without one: Iris adds it to the time of day, so it must be finite."""


class IrisJobHandle:
    """Job on Iris; pickles to its id. See `fray.v2.JobHandle`."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._terminated = False

    @property
    def job_id(self) -> str:
        return str(self._job.job_id)

    def status(self) -> JobStatus:
        return JobStatus.STOPPED if self._terminated else map_iris_job_state(self._job.state_only())

    def wait(
        self, timeout: float | None = None, *, raise_on_failure: bool = True, stream_logs: bool = False
    ) -> JobStatus:
        """Wait for the end. See `fray.v2.JobHandle.wait`; a failure raises `JobFailed` with Iris's text as a note.
        With ``stream_logs``, the job's output goes to the log meanwhile."""
        if self._terminated:
            return JobStatus.STOPPED
        try:
            limit = _NO_LIMIT_S if timeout is None else timeout
            self._job.wait(timeout=limit, poll_interval=POLL_LIMIT_S, raise_on_failure=False, stream_logs=stream_logs)
        except TimeoutError:
            if raise_on_failure:
                raise
            return self.status()
        status = self.status()
        if raise_on_failure and status == JobStatus.FAILED:
            failed = JobFailed(self.job_id, status)
            failed.add_note(self.why())
            raise failed
        return status

    def why(self) -> str:
        """Return Iris's text about the end of the job."""
        return str(self._job.status().error_message) or self.status().value

    def terminate(self) -> None:
        self._terminated = True
        self._job.cancel()

    def logs(self, max_lines: int | None = None) -> Any:
        """Return the output that Iris has stored. See `fray.v2.JobHandle.logs`."""
        # Without a limit Iris returns the first lines, up to its own number of them.
        lines = self._job.logs(max_lines=max_lines or 0, tail=max_lines is not None)
        return output_of((str(line.data).rstrip("\n") for line in lines), max_lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.job_id,)

    def __repr__(self) -> str:
        return f"<IrisJobHandle {self.job_id}>"


def _unpickled(job_id: str) -> IrisJobHandle:
    """Return the handle that was pickled, by the context of the job where it arrives."""
    from iris.cluster.types import JobName

    return IrisJobHandle(iris_connection().job(JobName.from_string(job_id)))


class HostingJob(IrisJobHandle):
    """Job that hosts an actor."""

    def __init__(self, job: Any, iris: Any) -> None:
        super().__init__(job)
        self.resolver = iris.resolver_for_job(job.job_id)
