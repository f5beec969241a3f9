"""Retries: how often a job may run again after an end, which budget pays for it, and how long it waits before.

Two kinds of accounts. A job has budgets by cause, for its whole life. An actor has one for all causes: ``max_restarts``
within ``restart_period_s``, and a supervised group has that one for all its members. A restart that only follows a
sibling's is free.
"""

from __future__ import annotations

from attrs import evolve

from fray.model.backoff import backoff_s
from fray.model.ids import attempt_id
from fray.model.restart_policy import (
    CRASH_S,
    CRASHES,
    BackoffPolicy,
    crash_loop_delay_s,
    is_within_limit,
    next_streak,
    restart_delay_s,
    restarts_in_period,
    with_jitter,
)
from fray.model.specs import ActorConfig, EndReason, ExitRule, JobSpec, Outcome, SupervisedGroup, SupervisionStrategy
from fray.model.text import byte_size_text
from fray.scheduler.lifecycle import BUDGETS, FALLBACK_BUDGET, MACHINE_CAUSES, OWN_CAUSES, Budget
from fray.scheduler.state.rows import AttemptRow, JobRow
from fray.scheduler.state.tables import Tables

FREE_BUDGETS = (Budget.SIBLING, Budget.PORTS, Budget.REQUEUE)
"""Budgets that charge no account of the user."""
PORT_RETRY_LIMIT = 100
"""Placements after which ports that other processes hold are an error."""
PORT_WAIT_S, PORT_WAIT_MAX_S = 0.1, 30.0
"""Seconds before the next placement, doubled with each, and the longest wait."""


def retry_limit(spec: JobSpec, budget: Budget) -> int | None:
    """Return the retries a budget has; negative: no limit. None: the author has set none, and another pays
    (`FALLBACK_BUDGET`)."""
    return {
        Budget.FAILURE: spec.max_retries_failure,
        Budget.PREEMPTION: spec.max_retries_preemption,
        Budget.MACHINE_LOSS: spec.max_retries_machine_loss,
        Budget.OUT_OF_MEMORY: spec.max_retries_out_of_memory,
        Budget.SIBLING: -1,
        Budget.REQUEUE: -1,
        Budget.PORTS: PORT_RETRY_LIMIT,
    }[budget]


def charged_budget(spec: JobSpec, cause: EndReason) -> Budget | None:
    """Return the budget that is charged for a retry after ``cause``, whether it has anything left or not."""
    budget = BUDGETS[cause]
    if budget is not None and retry_limit(spec, budget) is None:
        return FALLBACK_BUDGET[budget]
    return budget


def retries_spent(job: JobRow, budget: Budget) -> int:
    """Return the number of retries the budget has paid for."""
    # Counted by cause and summed here: which account pays for a cause is the spec's matter, and is not stored.
    return sum(count for cause, count in job.retries.items() if charged_budget(job.spec, cause) is budget)


def restart_config(job: JobRow) -> ActorConfig | None:
    """Return the policy that counts an actor's restarts; None: the job's budgets do."""
    config = job.spec.actor
    return config if config is not None and config.max_restarts is not None else None


def counted_restarts(job: JobRow) -> int:
    """Return how often the job was restarted on an account of its own."""
    return sum(
        count
        for cause, count in job.retries.items()
        if BUDGETS[cause] not in FREE_BUDGETS and not is_free_restart(job, cause)
    )


def is_free_restart(job: JobRow, cause: EndReason) -> bool:
    """Return whether a restart after ``cause`` is free: preemption does not count against an actor whose restarts are
    counted."""
    # The number of preemptions has a limit of its own (`Preemption.limit`), so they need not count here as well.
    return cause is EndReason.PREEMPTED and restart_config(job) is not None


def recent_restarts(state: Tables, job: JobRow) -> list[float]:
    """Return the times at which the job and its siblings were restarted, as far as they count now; oldest first.

    Siblings that fell at the same instant (with their machine) had one setback; a setback at this instant also counts
    for the job itself.
    """
    config = restart_config(job) or ActorConfig()
    if job.spec.siblings is None:
        return restarts_in_period(config, job.restart_times, state.now)
    # A set: members that died with one machine have equal times, and count once.
    others = {at for mate in state.siblings_of(job) if mate is not job for at in mate.restart_times}
    others -= {*job.restart_times, state.now}
    return sorted(restarts_in_period(config, (*job.restart_times, *others), state.now))


def affordable_budget(state: Tables, job: JobRow, first: Outcome) -> Budget | None:
    """Return the budget that would pay for a retry after ``first``; None: there is none, or it is used up."""
    if job.is_requeued:
        return Budget.REQUEUE
    budget = charged_budget(job.spec, first.cause)
    config = restart_config(job)
    # The author's rule for an exit code beats what budgets are left.
    if budget is None or exit_rule(job.spec, first) is ExitRule.FAIL:
        return None
    if is_free_restart(job, first.cause):
        return budget
    # Never up: the constructor's error is what the caller has to see, and a restart would repeat it.
    if config is not None and config.must_start and first.constructing and not job.retries:
        return None
    if config is None or budget in FREE_BUDGETS:
        most, used = retry_limit(job.spec, budget) or 0, retries_spent(job, budget)
    else:
        most, used = config.max_restarts or 0, len(recent_restarts(state, job))
    return budget if is_within_limit(most, used) else None


def may_requeue(job: JobRow) -> bool:
    """Return whether the author of a job allows it to run again after an end that is not its own doing."""
    return is_free_restart(job, EndReason.PREEMPTED) or retry_limit(job.spec, Budget.PREEMPTION) != 0


def retry_budget(state: Tables, job: JobRow, first: Outcome) -> Budget | None:
    """Return the budget that pays for a retry after ``first``; None: no retry."""
    # A job whose end was requested is not retried, whatever its budgets say.
    return None if job.stop_cause is not None else affordable_budget(state, job, first)


# Charges --------------------------------------------------------------------------------------------------------------


def charge_retry(state: Tables, job: JobRow, budget: Budget, first: Outcome, members: list[AttemptRow]) -> None:
    """Charge a retry to its budget, and set until when the job has to wait."""
    if budget is Budget.REQUEUE:
        job.requeues += 1
        return
    # Counted also when it is free: the limit of port retries is counted from these.
    job.retries[first.cause] = job.retries.get(first.cause, 0) + 1
    if budget is Budget.SIBLING or is_free_restart(job, first.cause):
        return
    # A pause, since the process that holds the port is not Fray's and may take a while to end.
    if budget is Budget.PORTS:
        job.held_until = state.now + backoff_s(PORT_WAIT_S, PORT_WAIT_MAX_S, retries_spent(job, budget))
        return
    config = restart_config(job)
    if not (counted_restarts(job) > 1 if config is None else recent_restarts(state, job)):
        job.first_restart_reason = outcome_text(first)
    if config is not None:
        most = max(0, config.max_restarts or 0)
        job.restart_times = (*job.restart_times, state.now)[
            -(most + 1) :
        ]  # one more than allowed, so that the invariants can detect it
    # Only the job's own doing counts towards a crash loop; a lost machine neither lengthens nor ends the series.
    if first.cause in OWN_CAUSES:
        job.crash_streak = job.crash_streak + 1 if _crashed(members) else 0
    elif config is None:
        return  # the machine's fault: it may go elsewhere at once
    # The longest-lived member counts: a gang that trained for hours before it failed starts with a short wait again.
    job.restart_streak = next_streak(_backoff_policy(job), job.restart_streak, _longest_run_s(members))
    wait_s = _wait_s(job, first)
    job.held_until = state.now + wait_s if wait_s else None


def _backoff_policy(job: JobRow) -> BackoffPolicy:
    return restart_config(job) or job.spec


def _wait_s(job: JobRow, first: Outcome) -> float:
    curve = _backoff_policy(job)
    crash_s = crash_loop_delay_s(curve, job.crash_streak) if first.cause in OWN_CAUSES else 0.0
    # Keyed by the attempt: the scheduler has no random numbers, and jobs that failed together must not return together.
    return with_jitter(
        max(restart_delay_s(curve, job.restart_streak), crash_s), attempt_id(job.job_id, job.generation, 0)
    )


def _crashed(members: list[AttemptRow]) -> bool:
    """Return whether it failed within seconds of its start; an actor that has registered has started well."""
    return _longest_run_s(members) < CRASH_S and not any(attempt.ready for attempt in members)


def crash_loop_text(job: JobRow) -> str:
    """Return a crash loop as text; empty: the job is not in a crash loop."""
    return (
        f"failed {job.crash_streak} times in a row within {CRASH_S:g} s of its start"
        if job.crash_streak >= CRASHES
        else ""
    )


def _longest_run_s(members: list[AttemptRow]) -> float:
    return max(map(_run_s, members), default=0.0)


def _run_s(attempt: AttemptRow) -> float:
    reported_s = attempt.outcome.duration_s if attempt.outcome else 0.0
    if attempt.ended_at is None or attempt.started_at is None:
        return reported_s
    return max(reported_s, attempt.ended_at - attempt.started_at)


def preferred_nodes(job: JobRow, members: list[AttemptRow]) -> tuple[str, ...]:
    """Return the nodes that the next generation prefers: those of this one, except machines that were at fault.

    Actors go where there is most room, and after a crash loop the machines are suspect too.
    """
    if job.spec.actor is not None or crash_loop_text(job):
        return ()
    # Files, caches and environments are on the node of before; it is a preference and never delays a placement.
    return tuple(
        "" if attempt.outcome is not None and attempt.outcome.cause in MACHINE_CAUSES else attempt.node
        for attempt in members
    )


def outcome_text(outcome: Outcome) -> str:
    """Return an outcome in one line."""
    return f"{outcome.cause.value}: {outcome.message}" if outcome.message else outcome.cause.value


def outcome_figures_text(outcome: Outcome) -> str:
    """Return the figures of an outcome, with a leading blank; empty: there are none."""
    parts = [
        f"exit code {outcome.exit_code}" if outcome.exit_code else "",
        f"{outcome.duration_s:.3g} s" if outcome.duration_s else "",
        f"{outcome.cpu_s:.3g} CPU s" if outcome.cpu_s else "",
        f"peak {byte_size_text(outcome.peak_memory_bytes)}" if outcome.peak_memory_bytes else "",
        "stacks captured" if outcome.captured else "",
    ]
    figures = ", ".join(part for part in parts if part)
    return f" [{figures}]" if figures else ""


def restarts_with(failed: SupervisedGroup, other: SupervisedGroup) -> bool:
    """Return whether a restart of ``failed`` also restarts ``other``."""
    if failed.strategy is SupervisionStrategy.ONE_FOR_ALL:
        return failed.index != other.index
    return failed.strategy is SupervisionStrategy.REST_FOR_ONE and other.index > failed.index


def sibling_restart_text(failed: JobRow) -> str:
    """Return why a sibling is ended that restarts together with ``failed``."""
    return f"restarts with {failed.job_id}"


# The end --------------------------------------------------------------------------------------------------------------


def final_outcome(state: Tables, job: JobRow, first: Outcome, members: list[AttemptRow]) -> Outcome:
    """Return the outcome to commit when no retry follows ``first``."""
    if job.stop_cause is None:
        return _with_history(state, job, first)
    if members and all(attempt.outcome and attempt.outcome.cause is EndReason.SUCCEEDED for attempt in members):
        own = members[0].outcome
        assert own is not None
        return own  # it had finished before the request arrived
    if affordable_budget(state, job, first) is None:
        return first
    again = f"it would have been retried after: {first.message or first.cause.value}"
    # Stopped while it was to be retried: the stop is the outcome, and its message keeps the failure that came before.
    text = job.stop_reason if first.cause is EndReason.SIBLING else f"{job.stop_reason}; {again}"
    return evolve(first, cause=job.stop_cause, message=text, value=None, stored=None)


def _with_history(state: Tables, job: JobRow, last: Outcome) -> Outcome:
    """Return the last error with the member of the gang that had it, and that it was not the first."""
    notes = [note for note in (first_member_text(state, job), _crash_loop_text(state, job, last)) if note]
    if not notes:
        return last
    return evolve(last, message=f"{last.message or last.cause.value} ({'; '.join(notes)})")


def first_member_text(state: Tables, job: JobRow) -> str:
    """Return which member of a gang ended its generation; empty for a job with one member, or when none did."""
    if job.first_member is None or job.spec.members == 1:
        return ""
    member = state.attempts[attempt_id(job.job_id, job.generation, job.first_member)]
    return f"member {member.member} of {job.spec.members}, on {member.node}, was the first to end"


def _crash_loop_text(state: Tables, job: JobRow, last: Outcome) -> str:
    if restart_config(job) is None:
        return _retries_text(job, last)
    times = recent_restarts(state, job) if BUDGETS[last.cause] is not None else []
    if not times:
        return ""
    count = "once" if len(times) == 1 else f"{len(times)} times"
    whose = "its group was" if job.spec.siblings else "it was"
    return f"{whose} restarted {count} in {state.now - times[0]:.4g} s{_first_reason_text(job, last)}"


def _retries_text(job: JobRow, last: Outcome) -> str:
    """Return how often a job without a restart policy was retried, by cause."""
    count = counted_restarts(job)
    if count < 2:
        return f"it was retried once, after {job.first_restart_reason}" if count else ""
    after = [f"after {cause.value.replace('_', ' ')}" for cause in job.retries]
    causes = [f"{n} {text}" for n, text in zip(job.retries.values(), after, strict=True)]
    causes_text = f" {after[0]}" if len(causes) == 1 else f": {', '.join(causes)}"
    return f"it was retried {count} times{causes_text}{_first_reason_text(job, last)}"


def _first_reason_text(job: JobRow, last: Outcome) -> str:
    return (
        f"; the first was needed after {job.first_restart_reason}"
        if job.first_restart_reason not in ("", outcome_text(last))
        else ""
    )


SYMPTOMS = (EndReason.FAILURE, EndReason.KILLED, EndReason.GANG)
"""Ends of the other members of a gang when a machine is taken from one of them."""


def first_cause(job: JobRow, members: list[AttemptRow], symptom_s: float) -> tuple[Outcome, int | None]:
    """Return the outcome and the member that ended this generation of a CLOSING job: the first cause, not the last
    symptom.

    When a machine dies, the other members of its gang often fail within seconds, long before the silence proves the
    death. So a loss that began no later than ``symptom_s`` after the failure is taken for its cause. The ``ended_at``
    of a lost attempt is when its machine fell silent.
    """
    assert job.first_outcome is not None
    # Only for ends that a dead machine can cause in others: a result or a rule is a cause of its own.
    if job.first_outcome.cause in SYMPTOMS:
        for attempt in members:
            outcome, at = attempt.outcome, attempt.ended_at
            if (
                outcome
                and outcome.cause in MACHINE_CAUSES
                and at is not None
                and at <= job.first_outcome_at + symptom_s
            ):
                return outcome, attempt.member
    return job.first_outcome, job.first_member


# Exit codes -----------------------------------------------------------------------------------------------------------

SIGNAL_BASE = 128
"""Shells report a death by signal n as exit code 128 + n."""


# A rule of `JobRequest.exit_codes` applies to a code that the process chose: that of a program, or of Python code that
# left by ``sys.exit`` or ``os._exit``. It does not apply to an exception that left the code (Python ends with 1 then,
# whatever it was), nor to an end that Fray has caused. Rule 128 + n also applies to a death by signal n, as in shells.


def chosen_code(outcome: Outcome) -> int | None:
    """Return the exit code that rules apply to; None: they do not apply to such an end."""
    if outcome.cause is EndReason.KILLED and outcome.signal is not None:
        # A shell reports its child's death by a signal with this code; a rule holds whether there was a shell or not.
        return SIGNAL_BASE + outcome.signal
    if outcome.cause is not EndReason.FAILURE or outcome.raised:
        return None
    return outcome.exit_code


def exit_rule(spec: JobSpec, outcome: Outcome) -> ExitRule | None:
    """Return the author's rule for such an end; None: there is none."""
    code = chosen_code(outcome)
    return spec.exit_codes.get(code) if code is not None else None


def apply_exit_rule(spec: JobSpec, outcome: Outcome) -> Outcome:
    """Return the outcome of an attempt under the author's rules: an ignored failure is a success without a value."""
    if exit_rule(spec, outcome) is not ExitRule.IGNORE:
        return outcome
    how = f"signal {outcome.signal}" if outcome.signal is not None else f"exit code {outcome.exit_code}"
    # No value: what was ignored has none, and `wait` returns None.
    return evolve(outcome, cause=EndReason.SUCCEEDED, value=None, message=f"{how} counts as success")
