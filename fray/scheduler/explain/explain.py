"""Why a job is in the state it is in, in words for people: constraint by constraint, machine by machine.

`reason` is the one line that travels with every `JobInfo`; `explain` is the whole page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from fray.errors import NoSuchJob
from fray.model.ids import JobId
from fray.model.resources import Demand
from fray.model.specs import EndReason
from fray.scheduler.autoscaler.view import machines_text as fleet_reason
from fray.scheduler.backfill.starvation import blocker, is_starving
from fray.scheduler.explain import forecast
from fray.scheduler.explain.group_text import (
    choices,
    group_lines,
    locality_suffix,
    waiting_members,
    waits_for_stage,
    waits_with_group,
)
from fray.scheduler.explain.preemption_text import kept_from, planned, preempting_text
from fray.scheduler.explain.reservation_text import waits_inside
from fray.scheduler.explain.unmet_constraints import FEW_CPUS, unmet_constraints
from fray.scheduler.jobs.holds import ending_group_members, ending_siblings, jobs_holding_name
from fray.scheduler.jobs.retries import (
    FREE_BUDGETS,
    crash_loop_text,
    outcome_text,
    recent_restarts,
    restart_config,
    retries_spent,
    retry_limit,
)
from fray.scheduler.lifecycle import Budget, JobPhase, NodePhase
from fray.scheduler.nodes.view import availability_text, closed_text
from fray.scheduler.pool.infeasible import is_infeasible, never_text
from fray.scheduler.pool.pool import (
    Machine,
    admits_demand,
    can_hold,
    fits_when_empty,
    variants,
)
from fray.scheduler.pool.requests import part_of
from fray.scheduler.pool.resource_text import needs
from fray.scheduler.pool.slice_text import slices_text
from fray.scheduler.queue.quotas import quota_text, quota_wait_text
from fray.scheduler.state.rows import AttemptRow, JobRow, Node, job_state
from fray.scheduler.state.tables import Tables

NODES_SHOWN = 20
HOLDERS_SHOWN = 4
ROOM = "room for a member"


# One machine ----------------------------------------------------------------------------------------------------------


def _machine_line(state: Tables, job: JobRow, node: Node) -> str:
    if not node.is_schedulable:
        return f"{node.name} {closed_text(node, state.now)}"
    machine = state.pool.machines[node.name]
    demand = _nearest(choices(state, job), machine)
    wrong = [text for _, text in unmet_constraints(demand, machine)]
    if not wrong:
        return f"{node.name} has room for a member"
    held = (
        _holders(state, node) if fits_when_empty(demand, 1, [machine.capacity]) else ""
    )  # else their end would not help
    return f"{node.name} {' and '.join(wrong)}{held}{_busy(demand, node)}"


def _nearest(demands: Sequence[Demand], machine: Machine) -> Demand:
    """Of any-of devices those that it has, best those that fit."""
    fitting = (demand for demand in demands if can_hold(machine, demand))
    there = (demand for demand in demands if variants(demand, machine.device_counts))
    return next(fitting, None) or next(there, demands[0])


def _busy(demand: Demand, node: Node) -> str:
    """Devices that are free by the books, and by nothing else."""
    busy = [f"{device} {why}" for device, why in node.busy.items() if device.startswith(f"{demand.device_kind}-")]
    return f"; not to be given now: {', '.join(busy[:HOLDERS_SHOWN])}" if busy and demand.device_count else ""


def _holders(state: Tables, node: Node) -> str:
    here = (state.jobs[state.attempts[attempt].job_id] for attempt in state.on_node[node.name])
    outside = (job.job_id for job in here if not job.spec.reservation_id)
    jobs = list(dict.fromkeys([*outside, *(f"reservation {one}" for one in state.reservations_on.get(node.name, ()))]))
    if not jobs:
        return ""
    more = f" and {len(jobs) - HOLDERS_SHOWN} more" if len(jobs) > HOLDERS_SHOWN else ""
    return f" (held by {', '.join(jobs[:HOLDERS_SHOWN])}{more})"


# One line -------------------------------------------------------------------------------------------------------------


def reason(state: Tables, job: JobRow) -> str:
    """Why it waits, while it waits; empty for a job that just runs or has ended."""
    words = _WORDS.get(job.phase)
    return words(state, job) if words else ""


def _waits(state: Tables, job: JobRow) -> str:
    ahead = state.queue.count_ahead(job.job_id)
    place = f"number {ahead + 1} of {len(state.queue)} in the queue"
    machines = fleet_reason(state, state.queue.applicants[job.job_id].shape)
    return "; ".join(text for text in (_unmet_demand(state, job), machines, place) if text)


def waits_for(state: Tables, job: JobRow) -> str:
    """What a job in the queue lacks, for those who are told beside it what it needs and where it stands."""
    machines = fleet_reason(state, state.queue.applicants[job.job_id].shape)
    return "; ".join(text for text in (_missing(state, job) or _census(state, job), machines) if text)


def _is_held(state: Tables, job: JobRow) -> str:
    """What a job waits for before it may even be placed."""
    if job.is_gathered:
        return waits_with_group(state, job)
    if job.held_until is not None:
        wait_s = max(0.0, job.held_until - state.now)
        loop = f" (crash loop: it {crash_loop_text(job)})" if crash_loop_text(job) else ""
        return f"restarts in {wait_s:.1f} s{loop}, after {_last_end(state, job)}"
    holding = list(jobs_holding_name(state, job))
    if holding:
        are = _are_being(holding)
        return f"waits for the end of {_name_list(holding)}, which {_has_or_have(holding)} its name and {are} ended"
    ending = list(ending_siblings(state, job))
    if not ending and (ending := list(ending_group_members(state, job))):
        return f"begins anew with its group, once {_name_list(ending)} {_has_or_have(ending)} ended"
    return (
        f"begins anew with its siblings, once {_name_list(ending)} {_has_or_have(ending)} ended"
        if ending
        else "is let go"
    )


def _last_end(state: Tables, job: JobRow) -> str:
    for attempt in reversed(list(state.attempt_records(job))):
        if attempt.outcome is not None:
            return (
                outcome_text(attempt.outcome)
                if attempt.outcome.cause is not EndReason.SIBLING
                else "a failure of a sibling"
            )
    return "its end"


def _has_or_have(names: list[JobId]) -> str:
    return "has" if len(names) == 1 else "have"


def _are_being(names: list[JobId]) -> str:
    return "is being" if len(names) == 1 else "are being"


def _unmet_demand(state: Tables, job: JobRow) -> str:
    if missing := _missing(state, job):
        return missing
    wants = needs(*choices(state, job))
    return f"needs {_members(job)}{wants}{locality_suffix(state, job)}; {_census(state, job)}"


def _missing(state: Tables, job: JobRow) -> str:
    """What is in its way other than machines that lack something."""
    applicant = state.queue.applicants[job.job_id]
    if taken := preempting_text(state, applicant):
        return taken
    if job.spec.reservation_id:
        return waits_inside(state, job, needs(job.spec.demand, *job.spec.alternatives))
    quota = quota_text(state.queue, state.queue.applicants[job.job_id])
    if quota:
        return quota
    holder = blocker(state, state.queue.applicants[job.job_id])
    if holder is not None:
        return f"held back for {holder}, which has waited for {state.config.starve_s:.0f} s or more"
    return kept_from(state, applicant)


def _members(job: JobRow) -> str:
    return f"{job.spec.members} times " if job.spec.members > 1 else ""


def _census(state: Tables, job: JobRow) -> str:
    """The machines in numbers, or the machine if there is only one."""
    nodes = list(state.nodes.values())
    if not nodes:
        return "no machine is connected"
    if len(nodes) == 1:
        return _machine_line(state, job, nodes[0])
    return state.pool.cached_text(choices(state, job), state.now, lambda: _counts(state, job))


def _counts(state: Tables, job: JobRow) -> str:
    demands, part = choices(state, job), part_of(job.spec)
    if part.slice_hosts and (slices := [text for one in demands if (text := slices_text(state.pool, part, one))]):
        return "; ".join(slices)
    machines = state.pool.machines.values()
    counts = Counter(_obstacle(state, _nearest(demands, machine), machine) for machine in machines)
    return "of the machines " + ", ".join(f"{count} {_is_or_are(what, count)}" for what, count in counts.items())


def _obstacle(state: Tables, demand: Demand, machine: Machine) -> str:
    """The first constraint it does not meet, in a word."""
    if can_hold(machine, demand):
        return ROOM
    if not machine.is_open:
        return availability_text(state.nodes[machine.name])
    if machine.cpu_milli < demand.cpu_milli <= machine.capacity.cpu_milli and admits_demand(demand, machine.capacity):
        return FEW_CPUS
    return next(unmet_constraints(demand, machine))[0]


def _is_or_are(what: str, count: int) -> str:
    if what.startswith(("too", ROOM)):
        return f"ha{'s' if count == 1 else 've'} {what}"
    return f"{'is' if count == 1 else 'are'} {what}"


def _starts(state: Tables, job: JobRow) -> str:
    if kept := waits_for_stage(state, job):
        return kept
    waiting = [attempt.node for attempt in state.members(job) if not attempt.ran]
    return f"starting on {_name_list(waiting)}"


def _closes(state: Tables, job: JobRow) -> str:
    living = state.living_members(job)
    why = (job.first_outcome.message or job.first_outcome.cause.value) if job.first_outcome else ""
    silent = _silent_text(state, job)
    return f"ending {len(living)} of {job.spec.members} members ({why})" + (f"; {silent}" if silent else "")


def _silent_text(state: Tables, job: JobRow) -> str:
    if not state.not_alive:
        return ""
    nodes = dict.fromkeys(attempt.node for attempt in state.living_members(job))
    nodes = {name: None for name in nodes if state.nodes[name].phase in (NodePhase.SUSPECT, NodePhase.LOST)}
    if not nodes:
        return ""
    return f"silent machines: {_name_list(list(nodes))} (given up after {state.config.lease_s:.0f} s, or on proof)"


_WORDS: Mapping[JobPhase, Callable[[Tables, JobRow], str]] = {
    JobPhase.QUEUED: _waits,
    JobPhase.HELD: _is_held,
    JobPhase.STARTING: _starts,
    JobPhase.RUNNING: _silent_text,
    JobPhase.CLOSING: _closes,
}


def _name_list(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - HOLDERS_SHOWN} more" if len(names) > HOLDERS_SHOWN else ""
    return ", ".join(names[:HOLDERS_SHOWN]) + more


# The whole page -------------------------------------------------------------------------------------------------------


def explain(state: Tables, job_id: JobId, now: float) -> str:
    """A page for people: the job's state, why, and what would change it.

    Raises:
        NoSuchJob: the cluster knows no such job.
    """
    job = state.jobs.get(job_id)
    if job is None and job_id in state.job_tombstones:
        past = state.job_tombstones[job_id]
        told = f": {past.message}" if past.message else ""
        return f"{job_id} ended long ago ({past.cause.value.replace('_', ' ')}){told}; this is all that is remembered"
    if job is None:
        raise NoSuchJob(f"the cluster knows no job {job_id!r}", job_id=job_id)
    lines = [f"{job_id} is {job_state(job).value}{_why(state, job)}"]
    if job.phase is JobPhase.QUEUED:
        lines += _waiting_lines(state, job, max(now, state.now))
    if job.is_gathered:
        lines += (
            f"  {each.job_id} needs {_members(each)}{needs(*choices(state, each))}"
            for each in waiting_members(state, job)
        )
        lines += group_lines(state, job)
        if job.spec.job_group in state.queue:
            lines += forecast.forecast_lines(state, state.queue.applicants[job.spec.job_group].shape)
    lines += [f"retries: {_retries(state, job)}"]
    lines += [_attempt_line(attempt) for attempt in state.attempt_records(job)]
    return "\n".join(lines)


def _why(state: Tables, job: JobRow) -> str:
    if job.outcome is not None:
        cause = job.outcome.cause.value.replace("_", " ")
        return f" ({cause})" + (f": {job.outcome.message}" if job.outcome.message else "")
    if job.phase is JobPhase.QUEUED:
        return ""
    text = reason(state, job)
    return f": {text}" if text else ""


def _waiting_lines(state: Tables, job: JobRow, now: float) -> Iterator[str]:
    shape = state.queue.applicants[job.job_id].shape
    members = f"{job.spec.members} members at once, each " if job.spec.members > 1 else ""
    yield f"needs {members}{needs(*choices(state, job))}{locality_suffix(state, job)}"
    ahead = state.queue.count_ahead(job.job_id)
    yield f"number {ahead + 1} of {len(state.queue)} in the queue; waiting for {now - job.queued_at:.0f} s"
    quota = quota_text(state.queue, state.queue.applicants[job.job_id])
    if quota:
        yield f"{quota}: {quota_wait_text(state.queue, state.queue.applicants[job.job_id])}"
        return
    holder = blocker(state, state.queue.applicants[job.job_id])
    if holder is not None:
        yield f"held back for {holder}, which came first and has waited for {state.config.starve_s:.0f} s or more"
    elif kept := kept_from(state, state.queue.applicants[job.job_id]):
        yield kept
    mine = preempting_text(state, state.queue.applicants[job.job_id]) or planned(
        state, state.queue.applicants[job.job_id]
    )
    if mine:
        yield mine
    elif is_starving(state, state.queue.applicants[job.job_id]):
        yield "it has waited so long that later jobs are kept off the machines it could use"
    if job.spec.reservation_id:
        yield waits_inside(state, job, needs(job.spec.demand, *job.spec.alternatives))
        yield from forecast.forecast_lines(state, shape)
        return
    if not state.nodes:
        yield "no machine is connected"
    machines = fleet_reason(state, state.queue.applicants[job.job_id].shape)
    if machines:
        yield f"machines {machines}" if machines.startswith("on their way") else machines
    nodes = [state.nodes[name] for name in sorted(state.nodes)]
    for node in nodes[:NODES_SHOWN]:
        yield f"  {_machine_line(state, job, node)}"
    if len(nodes) > NODES_SHOWN:
        yield f"  and {len(nodes) - NODES_SHOWN} more; {_counts(state, job)}"
    yield from list(_too_large(state, job)) or forecast.forecast_lines(state, shape)


def _too_large(state: Tables, job: JobRow) -> Iterator[str]:
    machines = {node.name: node.capacity for node in state.nodes.values()}
    part = part_of(job.spec)
    if machines and not state.pool.could_hold(part) and is_infeasible(part, machines):
        yield f"no change of load will help, more machines would: {never_text(job.spec, machines)}"


def _retries(state: Tables, job: JobRow) -> str:
    config = restart_config(job)
    if config is None:
        set_ones = [b for b in Budget if b not in FREE_BUDGETS and retry_limit(job.spec, b) is not None]
        return ", ".join(_budget(job, budget) for budget in set_ones)
    most = config.max_restarts or 0
    within = f" in {config.restart_period_s:g} s" if config.restart_period_s else ""
    whose = " for its group" if job.spec.siblings else ""
    return f"{len(recent_restarts(state, job))} of {most if most >= 0 else 'any number'}{within}{whose}"


def _budget(job: JobRow, budget: Budget) -> str:
    most = retry_limit(job.spec, budget) or 0
    return f"{retries_spent(job, budget)} of {most if most >= 0 else 'any number'} after {budget.value}"


def _attempt_line(attempt: AttemptRow) -> str:
    if attempt.outcome is None:
        return f"  {attempt.attempt_id} on {attempt.node}: {attempt.phase.value}"
    message = attempt.outcome.message.replace("\n", "\n    ")
    told = f": {message}" if message else ""
    return f"  {attempt.attempt_id} on {attempt.node}: {attempt.outcome.cause.value}{told}"
