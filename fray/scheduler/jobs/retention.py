"""Retention of records of jobs that have ended.

The whole record of an ended job is retained, except for what only a living job needs; later only a line
(`JobTombstone`), so that its id is recognized and never runs again (P4). Both are bounded by `SchedulerConfig`.
Messages of attempts are truncated, and of earlier generations only a limited number of attempts is retained.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from fray.model.ids import JobId, attempt_id
from fray.model.specs import Outcome
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.lifecycle import JobPhase
from fray.scheduler.state.rows import AttemptRow, JobRow, JobTombstone
from fray.scheduler.state.state import State

MESSAGE_LIMIT = 8_000
"""Characters of an attempt's message."""
MESSAGES_LIMIT = 4_000_000
"""Characters of the messages of all members of a generation: in a gang of 500 and more each has less."""
CAPTURED_LIMIT = 64_000
"""Characters of the stacks captured of all members of a generation."""
CAPTURED_MIN = 2_000
"""Characters of captured stacks that every member has at least, however many members there are."""
CAPTURED_GENERATIONS = 8
"""Generations whose captured stacks are retained."""
GENERATIONS_SKIPPED = 100_000
"""Generations skipped after a restore: more than a job has between backup and restore, at one a second for a day."""
LINE_LIMIT = 300
"""Characters of the message in a `JobTombstone`."""


def truncate_outcome(outcome: Outcome, members: int) -> Outcome:
    """Return the outcome with texts short enough to store and to send to every watcher."""
    # Divided by the members: the record of a job has all of them, and goes to every watcher.
    captured = max(CAPTURED_MIN, CAPTURED_LIMIT // members)
    message = max(LINE_LIMIT, min(MESSAGE_LIMIT, MESSAGES_LIMIT // members))
    if len(outcome.message) <= message and len(outcome.captured) <= captured:
        return outcome
    return evolve(outcome, message=_truncate(outcome.message, message), captured=_truncate(outcome.captured, captured))


def _truncate(text: str, most: int) -> str:
    """Return the beginning and the end of a text: the important line of an error is its first or its last."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def strip_ended_job(state: State, job: JobRow) -> None:
    """Drop the fields that only a living job needs, once it and all its attempts have ended."""
    # Paths for the interpreter: nothing will run by them any more.
    if job.spec.sys_path or job.spec.cwd is not None:
        job.spec = evolve(job.spec, sys_path=(), cwd=None)
    state.touch("job", job.job_id)


def strip_value(state: State, out: EffectBuffer, attempt: AttemptRow) -> None:
    """Drop the pickled value of the attempt's outcome, and retain the rest."""
    if attempt.outcome is not None and attempt.outcome.value is not None:
        out.release_blob(attempt.outcome.value)
        attempt.outcome = evolve(attempt.outcome, value=None)
        state.touch("attempt", attempt.attempt_id)


def forget_generations(state: State, job: JobRow) -> None:
    """Forget the oldest generations when a new one begins, and their captured stacks sooner."""
    for member in range(job.spec.members):
        # One generation a call: this is called once for each that begins.
        attempt = state.attempts.get(attempt_id(job.job_id, job.generation - 1 - CAPTURED_GENERATIONS, member))
        if attempt is not None and attempt.outcome is not None and attempt.outcome.captured:
            attempt.outcome = evolve(attempt.outcome, captured="")
            state.touch("attempt", attempt.attempt_id)
    # At least the last one, however large the gang is: it says why the job was retried.
    generations = max(1, state.config.records_limit // job.spec.members)
    while job.oldest < job.generation - generations:
        for member in range(job.spec.members):
            state.drop_attempt(state.attempts[attempt_id(job.job_id, job.oldest, member)])
        job.oldest += 1


def skip_generations(state: State) -> None:
    """Let no job of a store made from a backup use a generation that it may have used since the backup.

    The attempts of a generation have names in logs, results and checkpoints, and nodes know them: given a second time,
    the later ones would overwrite what the earlier ones wrote. How many there were since the backup is not known.
    Attempts that run according to the backup may still do, and remain as they are.
    """
    newest = max((job.generation for job in state.jobs.values()), default=0)
    state.meta.first_generation = max(newest, state.meta.first_generation) + GENERATIONS_SKIPPED
    state.touch("meta", "meta")
    for job in state.jobs.values():
        if job.phase in (JobPhase.QUEUED, JobPhase.HELD):
            begin_generation(state, job, job.generation)


def begin_generation(state: State, job: JobRow, generation: int) -> None:
    """Set the generation of a job without living attempts: this one, or a later one after a restore."""
    first = state.meta.first_generation
    if first > generation:
        # Records are looked up by counting generations, which a gap would make long. The history still has them.
        for attempt in state.attempt_records(job):
            state.drop_attempt(attempt)
        job.oldest = first
    job.generation = max(generation, first)
    state.touch("job", job.job_id)


def forget_finished(state: State, out: EffectBuffer) -> None:
    """Reduce, after every step, ended jobs beyond the limit or the age to a line, and forget the oldest lines."""
    rules = state.config
    surplus = len(state.finished_jobs) - rules.finished_limit
    oldest = state.now - rules.finished_keep_s
    for job_id in list(_jobs_to_forget(state, surplus, oldest)):
        job = state.jobs[job_id]
        out.release_blob(job.outcome.value if job.outcome else None)
        state.drop_job(job)
        # In the same step as the row goes: without it a repeated launch would run the job again.
        state.put_job_tombstone(_tombstone(job))
    # Results go before records: how a job ended is worth more than its value, and takes less.
    while state.value_sizes.total > rules.results_limit_bytes:
        _forget_value(state, out, state.jobs[next(iter(state.value_sizes))])
    while len(state.job_tombstones) > rules.history_limit:
        state.drop_job_tombstone(next(iter(state.job_tombstones)))


def _forget_value(state: State, out: EffectBuffer, job: JobRow) -> None:
    assert job.outcome is not None
    state.value_sizes.remove(job.job_id)
    out.release_blob(job.outcome.value)
    job.outcome, job.value_forgotten = evolve(job.outcome, value=None, value_bytes=0), True
    state.touch("job", job.job_id)


def _jobs_to_forget(state: State, surplus: int, oldest: float) -> Iterator[JobId]:
    """Yield ended jobs to forget, oldest end first; a job with an attempt on a silent machine waits for its end."""
    for job_id in state.finished_jobs:
        ended_at = state.jobs[job_id].ended_at or 0.0
        # Ordered by their ends, so the first that may stay ends the search.
        if surplus <= 0 and ended_at > oldest:
            return
        # The attempt holds its share of a silent machine by this row, until its end is proven.
        if not state.generation_counts[job_id].living:
            surplus -= 1
            yield job_id


def _tombstone(job: JobRow) -> JobTombstone:
    assert job.outcome is not None
    return JobTombstone(
        job_id=job.job_id,
        name=job.spec.name,
        namespace=job.spec.namespace,
        cause=job.outcome.cause,
        message=job.outcome.message[:LINE_LIMIT],
        exit_code=job.outcome.exit_code,
        had_value=job.outcome.value is not None or job.value_forgotten,
        ended_at=job.ended_at or 0.0,
        order=job.order,
        user=job.spec.user,
    )
