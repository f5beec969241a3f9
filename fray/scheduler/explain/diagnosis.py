"""Diagnosis of waiting jobs and groups: the reasons why they wait, as data.

`job_reasons` is what each `JobInfo` has in one line; `fray.scheduler.reasons` has the wording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fray.model.gangs import role_of
from fray.model.resources import Capacity, Demand
from fray.model.specs import EndReason
from fray.scheduler.autoscaler.view import machine_request_reasons
from fray.scheduler.backfill.start_plan import claim_shares
from fray.scheduler.backfill.starvation import blocker
from fray.scheduler.jobs.holds import (
    ending_group_members,
    ending_siblings,
    is_waiting_for_stage,
    jobs_holding_name,
)
from fray.scheduler.jobs.retries import crash_loop_text, outcome_text
from fray.scheduler.lifecycle import JobPhase, NodePhase
from fray.scheduler.nodes.view import closed_reason
from fray.scheduler.pool.infeasible import slice_reasons
from fray.scheduler.pool.pool import (
    Machine,
    admits_demand,
    can_hold,
    fits_when_empty,
    variants,
)
from fray.scheduler.pool.requests import Shares, part_of
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.queue.quotas import quota_reason
from fray.scheduler.reasons import Quantity, Reason, ReasonKind, count_reasons, device_text, reasons_text
from fray.scheduler.state.rows import JobGroupRow, JobRow, Node
from fray.scheduler.state.tables import Tables

BUSY_SHOWN = 4
"""Devices of a machine that are listed as unavailable."""
HELD_LOOKED_AT = 20
"""Machines held for one applicant that are looked at."""
_HAS_ROOM = Reason(ReasonKind.HAS_ROOM)
_FEW_CPUS = Reason(ReasonKind.IN_USE, free=Quantity("cpu", 0), whole=Quantity("cpu", 0))
"""Reason of machines that are counted, of which the amounts do not matter."""


# Jobs -----------------------------------------------------------------------------------------------------------------


def job_reasons(state: Tables, job: JobRow) -> list[Reason]:
    """Return why a job waits, the main reason first; empty for a job that runs normally or has ended."""
    match job.phase:
        case JobPhase.QUEUED:
            # The main reason first: `JobInfo.reason_kind` is its kind.
            machines = machine_request_reasons(state, state.queue.applicants[job.job_id].shape)
            return [_unmet_demand(state, job), *machines, queue_position(state, job.job_id)]
        case JobPhase.HELD:
            return [_hold_reason(state, job)]
        case JobPhase.STARTING:
            return [_starting_reason(state, job)]
        case JobPhase.RUNNING:
            return _silent_machines(state, job)
        case JobPhase.CLOSING:
            first = job.first_outcome
            cause = (first.message or first.cause.value) if first else ""
            living = len(state.living_members(job))
            ending = Reason(ReasonKind.ENDING, living=living, members=job.spec.members, cause=cause)
            return [ending, *_silent_machines(state, job)]
    return []


def job_reason_text(state: Tables, job: JobRow) -> str:
    """Return why a job waits in one line; empty for a job that runs normally or has ended."""
    return reasons_text(job_reasons(state, job))


def missing_reasons(state: Tables, job: JobRow) -> list[Reason]:
    """Return what a job in the queue lacks, without its demand and its position."""
    applicant = state.queue.applicants[job.job_id]
    blocking = blocking_reason(state, job)
    machines = machine_request_reasons(state, applicant.shape)
    return [*([blocking] if blocking else machine_reasons(state, job)), *machines]


def queue_position(state: Tables, applicant: str) -> Reason:
    """Return the position of a job or group in the queue."""
    number = state.queue.count_ahead(applicant) + 1
    return Reason(ReasonKind.QUEUE_POSITION, number=number, total=len(state.queue))


def _unmet_demand(state: Tables, job: JobRow) -> Reason:
    if blocking := blocking_reason(state, job):
        return blocking
    return Reason(
        ReasonKind.NEEDS_CAPACITY,
        details=machine_reasons(state, job),
        members=members_or_none(job),
        demands=member_choices(state, job),
        group=group_of_locality(state, job),
    )


def blocking_reason(state: Tables, job: JobRow) -> Reason | None:
    """Return why a job in the queue waits, if it is not that machines lack something."""
    applicant = state.queue.applicants[job.job_id]
    if preempting := preempting_reason(state, applicant):
        return preempting
    if job.spec.reservation_id:
        return reservation_reason(state, job)
    # In this order: with a quota in the way, free machines would not help.
    return quota_reason(state.queue, applicant) or held_for_earlier(state, applicant) or held_capacity(state, applicant)


def held_for_earlier(state: Tables, applicant: Applicant) -> Reason | None:
    """Return the starving applicant for which the machines this one could use are held."""
    holder = blocker(state, applicant)
    return Reason(ReasonKind.HELD_FOR_EARLIER, holder, waited_s=state.config.starve_s) if holder is not None else None


def reservation_reason(state: Tables, job: JobRow) -> Reason | None:
    """Return why a job waits in its reservation; None for a job without one."""
    row = state.reservations.get(job.spec.reservation_id)
    if row is None:
        return None
    units, max_units = len(row.staying_units), row.spec.max_units
    if not units:
        return Reason(ReasonKind.RESERVATION_EMPTY, row.id, phase=row.phase.value, units=units, max_units=max_units)
    return Reason(
        ReasonKind.RESERVATION_FULL,
        row.id,
        members=members_or_none(job),
        demands=(job.spec.demand, *job.spec.alternatives),
        units=units,
        max_units=max_units,
        leaving=len(row.units) - units or None,
        others=len(state.jobs_inside.get(row.id, ())) - 1,
    )


def members_or_none(job: JobRow) -> int | None:
    """Return the number of members of a gang."""
    return job.spec.members if job.spec.members > 1 else None


def member_choices(state: Tables, job: JobRow) -> tuple[Demand, ...]:
    """Return the alternatives that each member needs now: a member of a placed group goes where the others are."""
    return state.request_of(job).parts[0].choices if job.spec.job_group else (job.spec.demand, *job.spec.alternatives)


def group_of_locality(state: Tables, job: JobRow) -> str:
    """Return the placed group whose region or zone the job has to share; empty: none."""
    group = state.job_groups[job.spec.job_group] if job.spec.job_group else None
    return group.config.name if group is not None and group.config.same and group.place else ""


def _hold_reason(state: Tables, job: JobRow) -> Reason:
    if job.is_gathered:
        group = state.job_groups[job.spec.job_group]
        return Reason(ReasonKind.WAITS_WITH_GROUP, group.config.name, details=group_reasons(state, group))
    if job.held_until is not None:
        wait_s = max(0.0, job.held_until - state.now)
        return Reason(ReasonKind.BACKOFF, wait_s=wait_s, crash_loop=crash_loop_text(job), end=_last_end(state, job))
    # In the order of `holds.blocking_jobs`; the first of them that applies is enough.
    for kind, blocking in (
        (ReasonKind.NAME_TAKEN, jobs_holding_name),
        (ReasonKind.SIBLINGS_ENDING, ending_siblings),
        (ReasonKind.GROUP_ENDING, ending_group_members),
    ):
        if names := list(dict.fromkeys(blocking(state, job))):
            return Reason(kind, names=names)
    return Reason(ReasonKind.RELEASED)


def _last_end(state: Tables, job: JobRow) -> str:
    ended = (attempt.outcome for attempt in reversed(state.attempt_records(job)) if attempt.outcome is not None)
    last = next(ended, None)
    if last is None:
        return "its end"
    return outcome_text(last) if last.cause is not EndReason.SIBLING else "a failure of a sibling"


def _starting_reason(state: Tables, job: JobRow) -> Reason:
    if not job.spec.job_group or not is_waiting_for_stage(state, job):
        waiting = dict.fromkeys(attempt.node for attempt in state.members(job) if not attempt.ran)
        return Reason(ReasonKind.STARTING, names=waiting)
    earlier = [
        job_id
        for phase, jobs in state.group_members[job.spec.job_group].phases.items()
        if phase is not JobPhase.RUNNING
        for job_id in jobs
        if role_of(state.jobs[job_id].spec).stage < role_of(job.spec).stage
    ]
    nodes = tuple(dict.fromkeys(attempt.node for attempt in state.living_members(job)))
    return Reason(ReasonKind.WAITS_FOR_STAGE, names=earlier, nodes=nodes)


def _silent_machines(state: Tables, job: JobRow) -> list[Reason]:
    # The usual case, without a look at the members.
    if not state.not_alive:
        return []
    nodes = dict.fromkeys(attempt.node for attempt in state.living_members(job))
    silent = [name for name in nodes if state.nodes[name].phase in (NodePhase.SUSPECT, NodePhase.LOST)]
    return [Reason(ReasonKind.MACHINES_SILENT, names=silent, lease_s=state.config.lease_s)] if silent else []


def group_reasons(state: Tables, group: JobGroupRow) -> list[Reason]:
    """Return why a group has not started or not ended yet; empty: nothing stands in its way."""
    members = state.group_members[group.group_id]
    if group.ended_at is not None:
        return []
    if group.outcome is not None:
        return [Reason(ReasonKind.GROUP_ENDS, jobs=members.living_count)]
    if group.group_id in state.queue:
        room = Reason(ReasonKind.GROUP_NEEDS_ROOM, jobs=len(members.gathered), same=group.config.same)
        return [room, queue_position(state, group.group_id)]
    missing = [job_id for job_id in members.phases.get(JobPhase.HELD, ()) if job_id not in members.gathered]
    return [Reason(ReasonKind.GROUP_WAITS_FOR, names=missing)] if missing else []


# Preemption and held capacity -----------------------------------------------------------------------------------------


def preempting_reason(state: Tables, applicant: Applicant) -> Reason | None:
    """Return which jobs an applicant preempts; None: it preempts none."""
    claim = state.claims.get(applicant.id)
    if claim is None:
        return None
    left = tuple(job_id for job_id in claim.victims if job_id in state.ending_jobs)
    kind = ReasonKind.PREEMPTING if left else ReasonKind.PREEMPTED
    return Reason(kind, names=claim.victims, left=left)


def planned_start(state: Tables, applicant: Applicant) -> Reason | None:
    """Return when and where it starts at the latest, by the time limits of others; None: there is no such plan."""
    plan = state.start_plans.get(applicant.id)
    # A claim takes the place of a plan.
    if plan is None or plan.at is None or applicant.id in state.claims:
        return None
    return Reason(ReasonKind.START_PLANNED, names=plan.shares, in_s=max(0.0, plan.at - state.now))


def held_capacity(state: Tables, applicant: Applicant) -> Reason | None:
    """Return a machine that the applicant would fit on now but that is held for another; None: there is none."""
    shape = applicant.shape
    if shape.request.is_weightless:
        return None
    pool = state.pool_for(shape.reservation)
    for shares, kind, other, victims, in_s in _held_shares(state, applicant):
        # Bounded: a claim of a large gang has a thousand machines, and each waiting job asks.
        for name in list(shares)[:HELD_LOOKED_AT]:
            machine = pool.machines.get(name)
            if machine is not None and any(can_hold(machine, demand) for demand in shape.request.demands):
                return Reason(kind, name, victims, applicant=other, in_s=in_s)
    return None


def _held_shares(
    state: Tables, applicant: Applicant
) -> Iterator[tuple[Shares, ReasonKind, str, tuple[str, ...], float]]:
    for claim in state.claims.values():
        if claim.applicant != applicant.id and claim.reservation == applicant.shape.reservation:
            yield claim_shares(claim), ReasonKind.CAPACITY_CLAIMED, claim.applicant, tuple(claim.victims), 0.0
    for name, plan in state.start_plans.items() if not applicant.shape.is_child else ():
        other = state.queue.applicants.get(name)
        is_same = other is not None and other.shape.reservation == applicant.shape.reservation
        if name != applicant.id and is_same and plan.at is not None and name not in state.claims:
            yield plan.shares, ReasonKind.CAPACITY_PLANNED, name, (), max(0.0, plan.at - state.now)


# Machines -------------------------------------------------------------------------------------------------------------


def machine_reasons(state: Tables, job: JobRow) -> list[Reason]:
    """Return what the machines lack in numbers, or in full if there is only one machine."""
    nodes = list(state.nodes.values())
    if not nodes:
        return [Reason(ReasonKind.NO_MACHINE)]
    if len(nodes) == 1:
        return [machine_reason(state, job, nodes[0])]
    # Looking at all machines costs too much for each job: jobs with the same demand share the result.
    return state.pool.cached_reasons(member_choices(state, job), state.now, lambda: machine_counts(state, job))


def machine_counts(state: Tables, job: JobRow) -> list[Reason]:
    """Return how many machines (or slices) lack what."""
    demands, part = member_choices(state, job), part_of(job.spec)
    # Of a slice job the numbers of single hosts would say nothing.
    if part.slice_hosts and (slices := [each for one in demands for each in slice_reasons(state.pool, part, one)]):
        return slices
    machines = state.pool.machines.values()
    found = [_first_obstacle(state, _nearest_demand(demands, machine), machine) for machine in machines]
    return [Reason(ReasonKind.MACHINES, counts=count_reasons(found))]


def machine_reason(state: Tables, job: JobRow, node: Node) -> Reason:
    """Return everything that one machine lacks, and which jobs hold it; or that it has room."""
    if not node.is_schedulable:
        return Reason(ReasonKind.MACHINE, node.name, details=[closed_reason(node, state.now)], busy=())
    machine = state.pool.machines[node.name]
    demand = _nearest_demand(member_choices(state, job), machine)
    unmet = list(unmet_constraints(demand, machine))
    if not unmet:
        return Reason(ReasonKind.MACHINE, node.name, details=[_HAS_ROOM], busy=())
    # If the machine is too small even when empty, the end of its jobs would not help.
    holders = _holders(state, node) if fits_when_empty(demand, 1, [machine.capacity]) else []
    prefix = f"{demand.device_kind}-"
    busy = [f"{device} {why}" for device, why in node.busy.items() if demand.device_count and device.startswith(prefix)]
    return Reason(ReasonKind.MACHINE, node.name, holders, unmet, busy=tuple(busy[:BUSY_SHOWN]))


def _holders(state: Tables, node: Node) -> list[str]:
    jobs = (state.jobs[state.attempts[attempt].job_id] for attempt in state.on_node[node.name])
    outside = (job.job_id for job in jobs if not job.spec.reservation_id)
    reservations = (f"reservation {each}" for each in state.reservations_on.get(node.name, ()))
    return list(dict.fromkeys([*outside, *reservations]))


def _nearest_demand(demands: Sequence[Demand], machine: Machine) -> Demand:
    """Return, of alternative devices, those that fit, else those that the machine has."""
    fitting = (demand for demand in demands if can_hold(machine, demand))
    there = (demand for demand in demands if variants(demand, machine.device_counts))
    return next(fitting, None) or next(there, demands[0])


def _first_obstacle(state: Tables, demand: Demand, machine: Machine) -> Reason:
    if can_hold(machine, demand):
        return _HAS_ROOM
    if not machine.is_open:
        return closed_reason(state.nodes[machine.name], state.now)
    capacity = machine.capacity
    if machine.cpu_milli < demand.cpu_milli <= capacity.cpu_milli and admits_demand(demand, capacity):
        return _FEW_CPUS  # the usual case, without a look at the other constraints
    return next(unmet_constraints(demand, machine))


def unmet_constraints(demand: Demand, machine: Machine) -> Iterator[Reason]:
    """Yield every constraint of a member that the machine does not meet now."""
    capacity = machine.capacity
    yield from _unmet_locality(demand, capacity)
    for resource, wanted, free, whole in (
        ("cpu", demand.cpu_milli, machine.cpu_milli, capacity.cpu_milli),
        ("memory", demand.memory_bytes, machine.memory_bytes, capacity.memory_bytes),
        ("disk", demand.disk_bytes, machine.disk_bytes, capacity.disk_bytes),
    ):
        if whole < wanted:
            yield Reason(ReasonKind.TOO_SMALL, whole=Quantity(resource, whole))
        elif free < wanted:
            yield _in_use(resource, free, whole)
    if machine.ports.free < demand.ports:
        kind = ReasonKind.PORTS_IN_USE if capacity.ports.count else ReasonKind.NO_PORTS
        yield Reason(kind, free=machine.ports.free, ports=str(capacity.ports))
    if demand.device_count:
        yield from _unmet_devices(demand, machine)


def _in_use(resource: str, free: int, whole: int) -> Reason:
    return Reason(ReasonKind.IN_USE, free=Quantity(resource, free), whole=Quantity(resource, whole))


def _unmet_locality(demand: Demand, capacity: Capacity) -> Iterator[Reason]:
    attributes = capacity.attributes
    region, zone = attributes.get("region"), attributes.get("zone")
    if demand.regions and region not in demand.regions:
        yield Reason(ReasonKind.OTHER_REGION, place=region)
    if demand.zones and zone not in demand.zones:
        yield Reason(ReasonKind.OTHER_ZONE, place=zone)
    if not demand.preemptible and attributes.get("preemptible", "false").lower() == "true":
        yield Reason(ReasonKind.PREEMPTIBLE)
    if demand.containers and not attributes.get("containers"):
        yield Reason(ReasonKind.NO_CONTAINERS)
    for constraint in demand.constraints:
        if not constraint.meets(attributes):
            have = attributes.get(constraint.key)
            value = f"{constraint.key} {have}" if have else f"no {constraint.key}"
            yield Reason(ReasonKind.CONSTRAINT, str(constraint), value=value)


def _unmet_devices(demand: Demand, machine: Machine) -> Iterator[Reason]:
    devices, fitting = device_text(demand), variants(demand, machine.devices)
    whole = machine.device_counts
    free = {variant: len(machine.devices[variant]) for variant in fitting}
    if not fitting:
        yield Reason(ReasonKind.LACKS_DEVICES, devices)
    elif max(whole[variant] for variant in fitting) < demand.device_count:
        have = tuple(f"{whole[kind, variant]} {kind} {variant}" for kind, variant in fitting)
        yield Reason(ReasonKind.FEW_DEVICES, devices, have=have)
    elif max(free.values()) < demand.device_count:
        have = tuple(f"{free[each]} of {whole[each]} {each[0]} {each[1]}" for each in fitting)
        yield Reason(ReasonKind.DEVICES_IN_USE, devices, have=have)
