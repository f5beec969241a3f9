"""Lending of CPUs: a job that waits for jobs below it lends them its CPUs, so that a tree of jobs cannot starve itself.

Rules:

- An attempt lends from the report that its process waits for a job below it until the report that it does not.
- What it lends never becomes free in the pool. Only jobs below it, at any depth, on the same machine (and in the same
  reservation) are placed on it, after the placement passes and without taking what a claim holds. So no other job is
  let in or delayed; memory, disk and devices are not lent.
- A loan is part of the row of the attempt that uses it: it takes so much less of the machine, until it ends. When the
  lender stops waiting it continues at once, beside those attempts; when it ends first, they take over what they use.
- A job that another one owns as a whole (``spec.owned_by_job``) is lent nothing, and neither is what it launches: it
  would keep the loan beyond the end of the lender's attempt, and the next attempt might not fit beside it.
- What lending cannot resolve is an error: a job that would fit only without the jobs above it, which end after it,
  never starts (`fail_trapped_jobs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from fray.model.ids import AttemptId, NodeName
from fray.model.messages.client import Done
from fray.model.resources import Capacity, Demand
from fray.model.text import list_text
from fray.scheduler.backfill.backfill import MachineHolds
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import WaitReported
from fray.scheduler.jobs.transitions import fail_unschedulable, start_job
from fray.scheduler.pool.infeasible import is_infeasible
from fray.scheduler.pool.pool import fit
from fray.scheduler.pool.requests import MemberGroup, MemberPlacement, Placement, PlacementRequest, part_of
from fray.scheduler.queue.applicant import Applicant, PlacementShape
from fray.scheduler.queue.queue import make_waiting_shape
from fray.scheduler.queue.quotas import QuotaStatus, quota_status
from fray.scheduler.reasons import demand_text
from fray.scheduler.state.known_capacity import all_machines
from fray.scheduler.state.owners import owner_jobs
from fray.scheduler.state.rows import AttemptRow, JobRow
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import Tables
from fray.scheduler.state.what_if_pool import HypotheticalPool

TRAPPED_S = 3.0
"""Seconds after which waiting jobs are compared with what the jobs above them hold, and again as long as they wait."""


def on_wait_reported(state: State, event: WaitReported, out: EffectBuffer) -> None:
    """Handle the report of a job's process that it waits for jobs below it, or that it does not any more."""
    session = state.sessions.get(event.session)
    attempt_id = session.attempt_id if session is not None else None
    # A driver has no CPUs to lend, and a process that is known to be dead waits for nothing.
    if attempt_id and state.is_attempt_living(attempt_id):
        attempt = state.attempts[attempt_id]
        # Pinned CPUs are exclusive on their machine, also while their owner waits.
        state.set_lending(attempt, event.waiting and not state.jobs[attempt.job_id].spec.pin_cpus)
    out.reply(event.session, event.ref, Done(), late=True)


def attempts_above(state: Tables, owner: str) -> Iterator[AttemptRow]:
    """Return the living attempts in a chain of owners, the nearest first."""
    # Also those above an ended one, whose jobs are being ended.
    return (attempt for attempt in state.owner_attempts(owner) if attempt.living)


# Placing --------------------------------------------------------------------------------------------------------------


def place_on_loans(state: State, out: EffectBuffer) -> None:
    """Place waiting jobs on the CPUs that the jobs above them lend, in the order in which those were accepted."""
    inputs = state.placement_inputs()
    # The same inputs give the same result: most steps change neither the machines nor the queue.
    if inputs == state.lending_inputs:
        return
    children, holds = state.queue.children, MachineHolds(state)
    for owner in sorted(children, key=lambda owner: _order(state, owner)):
        lenders = [attempt for attempt in attempts_above(state, owner) if attempt.lends]
        shapes = sorted(children[owner], key=lambda shape: children[owner][shape].first) if lenders else []
        for shape in shapes:
            # Equal jobs fit or do not fit together, so the first refusal is that of all.
            while shape in children.get(owner, ()) and _place_first(state, out, owner, shape, lenders, holds):
                pass
    state.lending_inputs = state.placement_inputs()


def _order(state: State, owner: str) -> tuple[int, str]:
    attempt = state.attempts.get(owner)
    return (state.jobs[attempt.job_id].order if attempt is not None else 0), owner


def _place_first(
    state: State,
    out: EffectBuffer,
    owner: str,
    shape: PlacementShape,
    lenders: Sequence[AttemptRow],
    holds: MachineHolds,
) -> bool:
    """Place the first job of this shape that an owner waits for; return False if it does not fit."""
    applicant = state.queue.applicants[state.queue.children[owner][shape].first[-1]]
    part = shape.request.parts[0]
    # A job group waits for all its jobs at once, and a slice for whole machines; pinned CPUs are exclusive.
    is_pinned = applicant.id in state.jobs and state.jobs[applicant.id].spec.pin_cpus
    if len(shape.request.parts) > 1 or part.slice_hosts or is_pinned or applicant.id in state.claims:
        return False
    for choice, demand in enumerate(part.choices):
        with HypotheticalPool(state, shape.reservation) as trial:
            grants = _place_members(state, trial, demand, part.members, lenders, holds, applicant)
            if grants is None or _waits_for_quota(state, applicant, demand, grants):
                continue
            trial.commit()
        holds.on_placed(applicant, [grant.node for grant in grants])
        state.queue.remove(applicant.id)
        start_job(state, out, state.jobs[applicant.id], Placement(tuple(grants), choice))
        return True
    return False


def _place_members(
    state: State,
    trial: HypotheticalPool,
    demand: Demand,
    members: int,
    lenders: Sequence[AttemptRow],
    holds: MachineHolds,
    applicant: Applicant,
) -> list[MemberPlacement] | None:
    """Place all members, on lent CPUs where there are any; None if they do not fit."""
    to_lend = _cpu_to_lend(state, lenders, applicant.shape.reservation)
    grants = []
    for _ in range(members):
        grant = _place_on_loan(trial, demand, to_lend)
        if grant is None:
            placed = trial.place(PlacementRequest((MemberGroup((demand,)),)))
            if placed is None:
                return None
            grant = placed[0].grants[0]
        grants.append(grant)
    if not any(grant.loans for grant in grants):
        return None  # it fits without loans: the placement pass has refused it for another reason
    return grants if holds.respects_claims(trial.pool, applicant, [grant.node for grant in grants]) else None


def _cpu_to_lend(state: State, lenders: Sequence[AttemptRow], reservation: str) -> dict[NodeName, dict[AttemptId, int]]:
    """Return what is left to lend, in thousandths of CPUs, by machine and lender, the nearest ancestor first."""
    found: dict[NodeName, dict[AttemptId, int]] = {}
    for lender in lenders:
        if state.jobs[lender.job_id].spec.reservation_id == reservation and (left := state.cpu_to_lend(lender)):
            found.setdefault(lender.node, {})[lender.attempt_id] = left
    return found


def _place_on_loan(
    trial: HypotheticalPool, demand: Demand, to_lend: dict[NodeName, dict[AttemptId, int]]
) -> MemberPlacement | None:
    """Place one member on a machine with lent CPUs and take these; None if it fits on none."""
    for node, by_lender in to_lend.items():
        loans, missing = [], demand.cpu_milli
        for lender, left in by_lender.items():
            # Before free CPUs of the machine, which other jobs may use.
            if lent := min(left, missing):
                loans.append((lender, lent))
                missing -= lent
        rest = evolve(demand, cpu_milli=missing)
        machine = trial.pool.machines.get(node)
        grant = fit(rest, machine, trial.pool.now) if machine is not None and loans else None
        if grant is not None:
            trial.take(node, rest, grant.devices, grant.ports)
            for lender, lent in loans:
                by_lender[lender] -= lent
            return evolve(grant, loans=tuple(loans))
    return None


def _waits_for_quota(state: State, applicant: Applicant, demand: Demand, grants: Sequence[MemberPlacement]) -> bool:
    """Return whether what it takes beside its loans is more than its tenant may use."""
    if not state.shares.has_quotas:
        return False
    # Lent CPUs are charged already, as the lender's.
    rests = [evolve(demand, cpu_milli=demand.cpu_milli - sum(cpu for _, cpu in grant.loans)) for grant in grants]
    request = PlacementRequest(tuple(MemberGroup((rest,)) for rest in rests))
    shape = make_waiting_shape(PlacementShape(request, True, applicant.shape.reservation))
    return quota_status(state.shares, applicant.tenant, shape)[0] is QuotaStatus.WAITS


# Jobs that can never start --------------------------------------------------------------------------------------------


def watch_new_owners(state: State, out: EffectBuffer) -> None:
    """Set the timers of attempts whose jobs have begun to wait (`fail_trapped_jobs`)."""
    for owner in state.queue.new_owners:
        state.timers.set(("trapped", owner), state.now + TRAPPED_S)
    state.queue.new_owners.clear()


def fail_trapped_jobs(state: State, out: EffectBuffer, owner: str) -> None:
    """Fail waiting jobs of an owner that would fit only without the jobs above them, which end after them."""
    for shape in list(state.queue.children.get(owner, ())):
        first = state.jobs.get(state.queue.children[owner][shape].first[-1])
        text = _trapped_text(state, first) if first is not None else ""
        while text and shape in state.queue.children.get(owner, ()):
            job = state.jobs[state.queue.children[owner][shape].first[-1]]
            out.log_event(job.job_id, "trapped", text)
            fail_unschedulable(state, out, job, text)
    if owner in state.queue.children:
        state.timers.set(("trapped", owner), state.now + TRAPPED_S)


def _jobs_above(state: State, job: JobRow) -> Iterator[tuple[JobRow, bool]]:
    """Yield the jobs above it, the nearest first, and whether they lend it their CPUs when they wait."""
    lends = True
    for owner in owner_jobs(state.jobs, job):
        lends = lends and not job.spec.owned_by_job
        yield owner, lends
        job = owner


def _trapped_text(state: State, job: JobRow) -> str:
    """Return what the jobs above it hold that it needs; empty if it may start beside them."""
    reservation, part = job.spec.reservation_id, part_of(job.spec)
    if reservation:
        machines = {name: machine.capacity for name, machine in state.pool_for(reservation).machines.items()}
    else:
        machines = all_machines(state, job.spec.members)
    beside = dict(machines)
    holders = []
    for other, lends in _jobs_above(state, job):
        if other.spec.reservation_id != reservation:
            continue
        for attempt in state.living_members(other):
            # All but the CPUs that it lends when it waits.
            held = evolve(state.demand(other), cpu_milli=0) if lends else state.demand(other)
            if attempt.node in beside:
                beside[attempt.node] = _without(beside[attempt.node], held, attempt.devices)
                holders.append(f"{attempt.attempt_id} ({demand_text(held)} of {attempt.node})")
    if not holders or not is_infeasible(part, beside) or is_infeasible(part, machines):
        return ""
    return (
        f"it needs {demand_text(job.spec.demand, *job.spec.alternatives)}, which no machine has beside the jobs above "
        f"it, and these end only after it: {list_text(holders, 4)}; request less for one of them"
    )


def _without(capacity: Capacity, held: Demand, devices: Sequence[str]) -> Capacity:
    return evolve(
        capacity,
        cpu_milli=max(0, capacity.cpu_milli - held.cpu_milli),
        memory_bytes=max(0, capacity.memory_bytes - held.memory_bytes),
        disk_bytes=max(0, capacity.disk_bytes - held.disk_bytes),
        devices=tuple(device for device in capacity.devices if device.id not in devices),
    )


# Explaining -----------------------------------------------------------------------------------------------------------


def loan_lines(state: Tables, job: JobRow) -> Iterator[str]:
    """Yield what a job lends and what is lent to it, and for a waiting one what the jobs above it lend."""
    for attempt in state.living_members(job):
        if attempt.lends:
            yield f"  {attempt.attempt_id} waits for jobs below it {_lent_text(state, attempt)}"
        if attempt.loans:
            yield f"  {attempt.attempt_id} runs on {loans_text(attempt.loans)}"
    if job.job_id in state.queue:
        for attempt in attempts_above(state, job.owner):
            if attempt.lends:
                yield f"  above it, {attempt.attempt_id} on {attempt.node} waits {_lent_text(state, attempt)}"


def _lent_text(state: Tables, lender: AttemptRow) -> str:
    whole, used = state.demand(state.jobs[lender.job_id]).cpu_milli, list(state.lent_to.get(lender.attempt_id, ()))
    users = f", used by {list_text(used, 4)}" if used else ""
    return f"and lends its {_cpus(whole)} ({_cpus(state.cpu_to_lend(lender))} left{users})"


def loans_text(loans: Mapping[AttemptId, int]) -> str:
    return " and ".join(f"{_cpus(cpu_milli)} lent by {lender}" for lender, cpu_milli in loans.items())


def _cpus(cpu_milli: int) -> str:
    return f"{cpu_milli / 1000:g} CPU" + ("" if cpu_milli == 1000 else "s")
