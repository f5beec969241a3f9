"""Queue of jobs that wait for accelerators: first come, first served; why each waits, and until when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen


@frozen
class QueuedJob:
    """A job that waits."""

    job_id: str
    gpus: int


@frozen
class QueueDecision:
    """Jobs that start now, and the reasons of the others by id."""

    starts: tuple[tuple[str, tuple[int, ...]], ...]
    """Ids, each with the accelerators that it gets."""
    reasons: dict[str, str]


def decide_starts(waiting: Sequence[QueuedJob], taken: Mapping[str, Sequence[int]], total: int) -> QueueDecision:
    """Return which jobs start.

    A job without accelerators starts at once. Of the others none overtakes one that has waited longer.

    Args:
        waiting: jobs in the order in which they came.
        taken: accelerators of the jobs that run, by id of the job.
        total: number of accelerators.
    """
    used = {gpu for gpus in taken.values() for gpu in gpus}
    free = [gpu for gpu in range(total) if gpu not in used]
    starts: list[tuple[str, tuple[int, ...]]] = []
    reasons: dict[str, str] = {}
    for job in waiting:
        if job.gpus == 0 or (not reasons and job.gpus <= len(free)):
            starts.append((job.job_id, tuple(free[: job.gpus])))
            free = free[job.gpus :]
            continue
        place = len(reasons) + 1
        need = f"needs {job.gpus} GPUs, {len(free)} of {total} are free"
        before = "" if place == 1 else f"; {place - 1} before it"
        reasons[job.job_id] = f"number {place} in the queue: {need}{before}"
    return QueueDecision(tuple(starts), reasons)


def expected_start(
    job_id: str,
    waiting: Sequence[QueuedJob],
    taken: Mapping[str, Sequence[int]],
    total: int,
    ends: Mapping[str, float | None],
) -> float | None:
    """Return the time at which a job is expected to start; None: it is not known.

    It is when accelerators are free for it and for all before it, whose own ends are not known.

    Args:
        job_id: of the job.
        waiting: jobs in the order in which they came.
        taken: accelerators of the jobs that run, by id of the job.
        total: number of accelerators.
        ends: expected ends of the jobs that run, by id; None or missing: not known.
    """
    needed = 0
    for job in waiting:
        needed += job.gpus
        if job.job_id == job_id:
            break
    free = total - sum(map(len, taken.values()))
    known = [(end, len(gpus)) for name, gpus in taken.items() if gpus and (end := ends.get(name)) is not None]
    for end, count in sorted(known):
        free += count
        if free >= needed:
            return end
    return None
