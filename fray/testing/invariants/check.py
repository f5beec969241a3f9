"""Entry point of the invariants of the scheduler's state: `check` yields a sentence for each violation."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import Factory, define, evolve

from fray.model.specs import Outcome
from fray.scheduler.lifecycle import SessionPhase
from fray.scheduler.state.state import State
from fray.testing.invariants.groups import job_groups_are_sound
from fray.testing.invariants.indexes import indexes, quotas
from fray.testing.invariants.jobs import JOB_RULES, concerned_jobs, jobs, jobs_of, living_jobs
from fray.testing.invariants.machines import (
    MACHINE_RULES,
    RULES_OF_MOMENTS,
    RULES_OF_NODES,
    Rule,
    attempts,
    concerned_nodes,
    desired_attempts,
    living_attempts,
    looked_at,
)
from fray.testing.invariants.reservations import RESERVATION_RULES, RESERVATION_RULES_OF_CHANGES
from fray.testing.invariants.slices import slices_are_whole


def check(state: State, *, thorough: bool = True) -> list[str]:
    """Return the violations of a state; empty when it is sound. The cost grows with all rows: for tests.

    Args:
        thorough: also rebuild every index from the rows and compare, and check jobs that have ended: most of the cost.
            Violations there last, so that it is enough to check now and then.
    """
    rules = RULES if thorough else RULES_OF_THE_LIVING
    with looked_at(state):
        return [sentence for rule in rules for sentence in rule(state)]


def check_changed(state: State) -> list[str]:
    """Return the violations that the changes since the last save can have made, as far as rows show them.

    Of jobs only those are checked that were changed, or whose attempts or owners were, and of nodes those that were
    changed, or whose attempts or reservations were; and all rules whose violations the next step may hide. For
    scenarios that call `check` now and then, too: what lasts is found there.
    """
    concerned = concerned_jobs(state)
    if concerned is None:
        return []
    with looked_at(state, concerned_nodes(state)):
        found = [*jobs_of(state, concerned), *(sentence for rule in _RULES_OF_CHANGES for sentence in rule(state))]
        jobs_ = (state.jobs.get(job_id) for job_id in concerned)
        if any(job is not None and job.spec.job_group for job in jobs_):
            found += job_groups_are_sound(state)
        return found


@define
class CommittedOutcomes:
    """Outcomes that must never change once committed, which no single state shows. Pass the states in their order."""

    outcomes: dict[tuple[str, int], Outcome] = Factory(dict)
    """Outcomes of jobs and attempts, with the order of the job: an id that was forgotten may be used again."""

    def check(self, state: State) -> list[str]:
        """Return the jobs and attempts whose outcome differs from the one they had, as sentences."""
        jobs = ((job_id, job.order, job.outcome) for job_id, job in state.jobs.items())
        attempts = ((id_, state.jobs[one.job_id].order, one.outcome) for id_, one in state.attempts.items())
        return [sentence for one in (*jobs, *attempts) for sentence in self._one(*one)]

    def _one(self, name: str, order: int, now: Outcome | None) -> Iterator[str]:
        before = self.outcomes.get((name, order))
        if now is before:
            return
        if before is not None and (now is None or now != _lasting_part(before, now)):
            yield f"{name} had the outcome {before}, and has {now}"
        elif now is not None:
            if before is not None and now.value not in (None, before.value):  # unused values are dropped
                yield f"{name} had the value {before.value}, and has {now.value}"
            self.outcomes[name, order] = now


def _lasting_part(before: Outcome, now: Outcome) -> Outcome:
    """Return an outcome without what is retained for a limited time: its value, and its captured stacks."""
    size_bytes = before.value_bytes if now.value else now.value_bytes
    captured = before.captured if now.captured else ""
    return evolve(before, value=now.value, value_bytes=size_bytes, captured=captured)


def _sessions(state: State) -> Iterator[str]:
    """Yield ended sessions that own living jobs."""
    for session in state.sessions.values():
        if session.phase is SessionPhase.ENDED and session.attempt_id is None and state.owned_jobs(session.session):
            yield f"session {session.session} has ended and owns {state.owned_jobs(session.session)}"
        if session.phase is SessionPhase.CLOSING and session.session not in state.closing_sessions:
            yield f"session {session.session} is closing and owns nothing"


def _names(state: State) -> Iterator[str]:
    """Yield names of dead incarnations, and exclusive names with several actors."""
    for binding in state.registrations.values():
        endpoint = binding.endpoint
        session = state.sessions.get(endpoint.incarnation)
        if not state.is_attempt_living(endpoint.incarnation) and (session is None or session.is_ending):
            yield f"name {endpoint.name} is bound to the dead {endpoint.incarnation}"
    for key, actors in state.registrations_by_key.items():
        if len(actors) > 1 and any(state.registrations[actor].exclusive for actor in actors):
            yield f"{key} is exclusive and bound to {list(actors)}"


def _bounds(state: State) -> Iterator[str]:
    most = state.config.finished_limit
    idle = [job_id for job_id in state.finished_jobs if not state.generation_counts[job_id].living]
    for what, count in (
        ("jobs", len(idle)),
        ("sessions", len(state.ended_sessions)),
        ("actors", len(state.actor_tombstones)),
    ):
        if count > most:
            yield f"{count} ended {what} on record, the limit is {most}"
    if state.value_sizes.total != sum(state.value_sizes.values()):
        yield f"results have {sum(state.value_sizes.values())} bytes, and are counted as {state.value_sizes.total}"
    if state.value_sizes.total > state.config.results_limit_bytes:
        yield f"results of {state.value_sizes.total} bytes are kept, the limit is {state.config.results_limit_bytes}"
    if len(state.job_tombstones) > state.config.history_limit:
        yield f"{len(state.job_tombstones)} lines of old jobs, the limit is {state.config.history_limit}"
    yield from (f"{job_id} is on record and in the past" for job_id in state.job_tombstones if job_id in state.jobs)


RULES: tuple[Rule, ...] = (
    *MACHINE_RULES,
    *JOB_RULES,
    job_groups_are_sound,
    indexes,
    _sessions,
    _names,
    _bounds,
    quotas,
    slices_are_whole,
    *RESERVATION_RULES,
)

_SHORTER: dict[Rule, Rule] = {jobs: living_jobs, attempts: living_attempts}
RULES_OF_THE_LIVING = tuple(_SHORTER.get(rule, rule) for rule in RULES if rule not in (indexes, desired_attempts))
_RULES_OF_CHANGES = (
    *RULES_OF_NODES,
    *RULES_OF_MOMENTS,
    *(rule for rule in JOB_RULES if rule is not jobs),
    *RESERVATION_RULES_OF_CHANGES,
)
