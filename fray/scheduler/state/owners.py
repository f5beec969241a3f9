"""Owners of jobs: a driver's session, an attempt of another job, another job as a whole, or the cluster.

What an attempt owns ends with that attempt. What a job owns (``spec.owned_by_job``) stays while the job restarts, and
ends with the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fray.model.ids import JobId, split_attempt
from fray.scheduler.state.rows import JobRow


def is_child(job: JobRow) -> bool:
    """Return whether the job was launched by a running job and ends with it, or with one attempt of it."""
    return bool(job.owner) and job.owner != job.root


def owner_job_id(job: JobRow) -> JobId | None:
    """Return the job that owns it, as a whole or by an attempt; None: a driver or the cluster does."""
    if not is_child(job):
        return None
    return job.owner if job.spec.owned_by_job else split_attempt(job.owner)[0]


def owner_jobs(jobs: Mapping[JobId, JobRow], job: JobRow) -> Iterator[JobRow]:
    """Yield the jobs in its chain of owners, the nearest first."""
    owner = jobs.get(owner_job_id(job) or "")
    while owner is not None:
        yield owner
        owner = jobs.get(owner_job_id(owner) or "")
