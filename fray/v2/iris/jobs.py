"""Jobs of Iris, by handles."""

from __future__ import annotations

from typing import Any

from fray.v2.iris.convert import iris_client, state_of
from fray.v2.job import JobFailed, JobStatus


class IrisJobHandle:
    """A job of Iris; see `fray.v2.JobHandle`. It pickles to its id."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._terminated = False

    @property
    def job_id(self) -> str:
        return str(self._job.job_id)

    def status(self) -> JobStatus:
        return JobStatus.STOPPED if self._terminated else state_of(self._job.status().state)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """As `fray.v2.JobHandle.wait`; a failure is `JobFailed`, with Iris's words about it."""
        if self._terminated:
            return JobStatus.STOPPED
        try:
            self._job.wait(timeout=float("inf") if timeout is None else timeout, raise_on_failure=False)
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
        """Its end, in Iris's words."""
        return str(getattr(self._job.status(), "error", "")) or self.status().value

    def terminate(self) -> None:
        self._terminated = True
        self._job.terminate()

    def logs(self) -> str:
        """What Iris has of its output."""
        return "".join(str(getattr(line, "data", line)) for line in self._job.logs())

    def __reduce__(self) -> tuple[Any, ...]:
        return _job_again, (self.job_id,)

    def __repr__(self) -> str:
        return f"<IrisJobHandle {self.job_id}>"


def _job_again(job_id: str) -> IrisJobHandle:
    """A handle that has travelled, by the context of the job it came to."""
    iris = iris_client()
    return IrisJobHandle(iris.Job(iris.iris_ctx().client, job_id))


class HostingJob(IrisJobHandle):
    """The job that hosts an actor."""

    def __init__(self, job: Any, iris: Any) -> None:
        super().__init__(job)
        self.resolver = iris.resolver_for_job(job.job_id)
