"""Preemption: jobs that are ended so that an applicant fits; few, whole, with notice and bounded in number.

An applicant that does not fit, and as far as is known will not within ``patience_s``, takes the machines of jobs

- of later bands, if the policy names its own (`Preemption.bands`);
- that have borrowed what its tenant is entitled to (reclaim), of its own band or later ones.

`victims` chooses them. Exempt are jobs that are not preemptible, that have had their machines for less than
``shield_s``, that were preempted ``limit`` times within ``period_s``, and the owners of the applicant. So no job is
preempted more than ``limit`` times in any ``period_s``.

What becomes free is claimed: held for the applicant until it is placed, waits no more, or one of the machines is gone.
So no other applicant takes it, and no other job is ended for the same need. The claim is a row, which outlives the
controller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence

from fray.model.ids import AttemptId, JobId, NodeName
from fray.model.policy.policy import Preemption
from fray.model.policy.priority import Band
from fray.model.text import list_text
from fray.scheduler.backfill.backfill import MachineHolds, capacity_after_pending
from fray.scheduler.backfill.start_plan import is_ending
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.transitions import preempt_job
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.pool.pool import Machine, can_hold
from fray.scheduler.pool.requests import shares_of
from fray.scheduler.preemption.candidates import SearchMemory, SearchPaused
from fray.scheduler.preemption.cost import (
    descendants,
    lost_work_s,
    roots_of,
)
from fray.scheduler.preemption.quota_reclaim import first_not_borrowing, may_reclaim, usage_after_pending
from fray.scheduler.preemption.victims import PreemptionChoice, choose_victims
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, StartPlan
from fray.scheduler.queue.indexes import TenantShapeQueue
from fray.scheduler.reservations.reclaim_surplus import reclaimable_units, surplus_suffices
from fray.scheduler.reservations.release_units import request_release
from fray.scheduler.state.owners import owner_jobs
from fray.scheduler.state.rows import CapacityClaim, ClaimedShare, JobRow
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import SearchKey, Tables
from fray.scheduler.state.unit_rows import ON_ITS_WAY
from fray.scheduler.state.what_if_pool import HypotheticalPool

RETRY_SEARCH_S, MAX_RETRY_SEARCH_S = 5.0, 40.0
"""Seconds after a failed search until the next one, doubled each time: shields end, and counts fall."""
NEXT_STEP_S = 0.1
"""Seconds until the rest of what is too much for one step is done."""
DEVICE_RELEASE_S = 60.0
"""Seconds for which devices may be held by remaining processes of a victim, while they count as being released."""
NOT_SEARCHED = (-math.inf, 0.0)
MAX_TRIES = 8
"""Searches for one applicant, each without a job whose tenant does not borrow any more."""
VICTIMS_SHOWN = 4
"""Victims that are named in a message."""
SEARCH_WORK = 20
"""Work of a search (see `Queue.work`), besides a unit for each examined job, and for each claimed place of a member,
which every search takes first."""
MAX_EXAMINED = 500
"""Jobs that one search examines in one step; the next step continues it."""
MAX_PAUSED, KEEP_PAUSED_S = 16, 10.0
"""Maximum number of searches that are to be continued, and seconds after which one that was not begins again."""
MAX_BACKOFFS = 10_000
MACHINE_REQUEST_S = 3.0
"""Seconds within which machines are requested for an applicant that they may serve."""


# Eligible victims


def recent_preemptions(job: JobRow, rule: Preemption, now: float) -> tuple[float, ...]:
    """Return when the job was preempted, as far as that counts now."""
    return tuple(at for at in job.preempted_at if at > now - rule.period_s)


def protection_reason(state: Tables, job: JobRow) -> str:
    """Return why the job may not be preempted now; empty if it may."""
    rule = state.policy.preemption
    if not rule.enabled:
        return "preemption is disabled"
    if not job.spec.demand.preemptible:
        return "it is not preemptible"
    ran_s = state.now - (job.placed_at or 0.0)
    if ran_s < rule.shield_s:
        return f"it started {ran_s:.0f} s ago, and is shielded for {rule.shield_s:g} s"
    times = len(recent_preemptions(job, rule, state.now))
    if times >= rule.limit:
        return f"it was preempted {times} times in the last {rule.period_s:g} s, which is the limit"
    return ""


def is_preemptable_by_band(state: Tables, applicant: Applicant) -> Callable[[JobRow], bool]:
    """Return a test for jobs the applicant may preempt by its band, without regard to shields and limits."""
    may = applicant.band in state.policy.preemption.bands
    return lambda job: may and job.band.rank > applicant.band.rank


def is_preemptable_by(state: Tables, applicant: Applicant) -> Callable[[JobRow], bool]:
    """Return a test for jobs the applicant may preempt by its band, or by its tenant's quota."""
    of_band = is_preemptable_by_band(state, applicant)
    if not may_reclaim(state, applicant):
        return of_band
    # Once for the whole search: it goes through all jobs that are ending.
    given, rank = usage_after_pending(state), applicant.band.rank
    return lambda job: of_band(job) or (job.band.rank >= rank and given.is_borrowing(job))


def is_victim_for(state: Tables, applicant: Applicant) -> Callable[[JobRow], bool]:
    """Return a test for jobs that may be ended for the applicant, with all they own."""
    may = is_preemptable_by(state, applicant)
    own = state.job_of(applicant)
    above = {job.job_id for job in owner_jobs(state.jobs, own)} if own is not None else set()

    def is_eligible(job: JobRow) -> bool:
        # The end of a job inside a reservation frees machines of that reservation only.
        if job.spec.reservation_id != applicant.shape.reservation:
            return False
        # Members of a job group are placed together, and so they end together: each of them must be eligible.
        return all(map(may_be_ended, roots_of(state, job))) if job.spec.job_group else may_be_ended(job)

    def may_be_ended(job: JobRow) -> bool:
        # The end of an owner would end the applicant, too, or it is the job that uses the applicant.
        if job.job_id in above or job.stop_cause is not None or not may(job) or protection_reason(state, job):
            return False
        # Children end with the victim, so they must be eligible. They have no shield of their own: with one, a job that
        # launches children all the time could never be preempted.
        return all(child.spec.demand.preemptible and may(child) for child in descendants(state, job))

    return is_eligible


def bands_below(state: Tables, applicant: Applicant) -> list[Band]:
    """Return bands with possible victims that run, the latest first."""
    rule, rank = state.policy.preemption, applicant.band.rank
    first = rank if may_reclaim(state, applicant) else rank + 1 if applicant.band in rule.bands else len(Band)
    return [band for band in reversed(Band) if band.rank >= first and state.running_by_band[band]]


# Searching


def would_preempt(state: Tables, applicant: Applicant, closed: Container[NodeName] = ()) -> PreemptionChoice | None:
    """Return which jobs would be ended for the applicant now, and where it would be placed; None if nothing helps.

    A choice without victims means that what is ending anyway makes room. Changes nothing.
    """
    return _search_victims(state, applicant, closed, SearchMemory())


def _continue_search(state: Tables, applicant: Applicant, closed: Container[NodeName]) -> PreemptionChoice | None:
    """Return the same, with what earlier steps have found. Raises SearchPaused if it is too much for this step."""
    key = _search_key(state, applicant)
    memory = state.paused_searches.pop(key, None)
    if memory is None or memory.used_at < state.now - KEEP_PAUSED_S:
        memory = SearchMemory()
    memory.budget, memory.work, memory.used_at = MAX_EXAMINED, SEARCH_WORK, state.now
    try:
        return _search_victims(state, applicant, closed, memory)
    except SearchPaused:
        if len(state.paused_searches) >= MAX_PAUSED:
            del state.paused_searches[next(iter(state.paused_searches))]
        state.paused_searches[key] = memory
        raise
    finally:
        state.queue.work += memory.work


def _search_victims(
    state: Tables, applicant: Applicant, closed: Container[NodeName], memory: SearchMemory
) -> PreemptionChoice | None:
    """Return the same. Raises SearchPaused if the budget is spent."""
    bands = bands_below(state, applicant)
    rule, request = state.policy.preemption, applicant.shape.request
    # Growth of a reservation is optional capacity: no job ends for it.
    if not rule.enabled or not bands or applicant.kind is ApplicantKind.GROWTH or request.is_weightless:
        return None
    if all(name in closed for name in state.pool_for(applicant.shape.reservation).machines):
        return None  # before pending ends and claims are applied, which is slow
    claimed = sum(share.members for claim in state.claims.values() for share in claim.shares)
    memory.work += claimed
    with HypotheticalPool(state, applicant.shape.reservation) as trial:
        # If what ends anyway makes enough room, waiting is the answer: the choice has no victims.
        apply_pending(state, trial, but=applicant.id)
        placed = trial.place(request, closed)
        if placed is not None:
            return PreemptionChoice((), placed)
        choice = _choose_victims(state, trial, applicant, bands, closed, memory)
        spare = reclaimable_units(state, applicant) if choice is None else []
        for surplus in spare:  # preemption and surplus each may be too little, but enough together
            surplus.move_share(trial, +1)
        if spare:
            choice = _choose_victims(state, trial, applicant, bands, closed, memory, "with surplus")
        return choice


def _choose_victims(
    state: Tables,
    trial: HypotheticalPool,
    applicant: Applicant,
    bands: list[Band],
    closed: Container[NodeName],
    memory: SearchMemory,
    which: str = "",
) -> PreemptionChoice | None:
    """Return the cheapest choice in which no victim's tenant gives back more than it has borrowed."""
    may, of_band = is_victim_for(state, applicant), is_preemptable_by_band(state, applicant)
    since = state.now - state.policy.preemption.shield_s
    held: dict[JobId, None] = {}
    for _ in range(MAX_TRIES):
        request, memory.scope = applicant.shape.request, (which, *held)
        choice = choose_victims(
            trial, request, lambda job: job.job_id not in held and may(job), bands, since, closed, memory
        )
        if choice is None:
            return None
        # The search does not know quotas: a victim whose tenant would fall below its quota is excluded, and the search
        # repeated.
        wrong = first_not_borrowing(state, [job for unit in choice.units for job in unit.roots], of_band)
        if wrong is None:
            return choice
        held[wrong.job_id] = None
    return None


def apply_pending(state: Tables, trial: HypotheticalPool, but: str = "") -> None:
    """Free what is ending or being released, and take what others have claimed."""
    ending = map(state.jobs.__getitem__, state.ending_jobs)
    # All at once: they are hundreds, on a few dozens of machines.
    trial.end(one for job in ending for one in (job, *descendants(state, job)))
    for reservation_id in state.releasing if not trial.reservation else ():
        reservation = state.reservations[reservation_id]
        for unit in reservation.leaving_units:
            for host in unit.hosts:
                trial.free(host.node, reservation.demand_of(unit), host.devices)
    trial.take_claims(but)


# Preempting


def drop_stale_claims(state: State) -> None:
    """Drop claims that are not needed any more, or cannot be fulfilled."""
    for claim in list(state.claims.values()):
        served = all(_can_serve_claim(state, share.node, claim.reservation) for share in claim.shares)
        if claim.applicant not in state.queue or not served:
            state.drop_claim(claim.applicant)


def _can_serve_claim(state: State, name: NodeName, reservation: str) -> bool:
    """Return whether the node takes work, or will soon.

    It may be silent for a moment, as after a restart of the controller. A node in quarantine, or one that is leaving
    the cluster or the reservation, will not take work.
    """
    node = state.nodes.get(name)
    if node is None or node.phase not in (NodePhase.ALIVE, NodePhase.SILENT):
        return False
    if node.cordon is not None or node.quarantine is not None or node.is_leaving:
        return False
    if not reservation or not node.is_schedulable:
        return True
    inside = state.reservation_pools[reservation].machines.get(name) if reservation in state.reservation_pools else None
    return inside is not None and inside.is_open


def is_claim_pending(state: Tables, claim: CapacityClaim) -> bool:
    """Return whether something still ends on the claimed machines, or one of them is unavailable for a moment."""
    nodes = dict.fromkeys(share.node for share in claim.shares)
    pool = state.pool_for(claim.reservation)
    if not all(node in pool.machines and pool.machines[node].is_open for node in nodes):
        return True
    if any(_has_leaving_unit(state, node) for node in nodes):
        return True
    attempts = (state.attempts[attempt_id] for node in nodes for attempt_id in state.on_node[node])
    if any(is_ending(state, state.jobs[attempt.job_id]) for attempt in attempts):
        return True
    # The remains of a victim may hold its devices for a while after its end. A device that is busy for longer is lost
    # to some other process: the claim is dropped then, and other victims are sought.
    return state.now < claim.made_at + DEVICE_RELEASE_S and any(
        _has_withheld_device(pool.machines[s.node], s) for s in claim.shares
    )


def is_claim_blocked(state: Tables, claim: CapacityClaim) -> bool:
    """Return whether an attempt that is ending has to end first: the claim is pending, and cannot be served yet.

    False does not mean that it can be served. Quick, as long as that attempt lives: asked for each claim in each pass.
    """
    blockers = state.queue.claim_blockers
    known = blockers.get(claim.applicant)
    if known is not None and _is_blocker(state, claim, *known):
        return True
    for node in dict.fromkeys(share.node for share in claim.shares):
        for attempt_id in state.on_node.get(node, ()):
            if _is_blocker(state, claim, node, attempt_id):
                blockers[claim.applicant] = node, attempt_id
                return True
    return False


def _is_blocker(state: Tables, claim: CapacityClaim, node: NodeName, attempt_id: AttemptId) -> bool:
    """Return whether the attempt is ending there, and the machine has no room yet for a member of the claim."""
    is_there = attempt_id in state.on_node.get(node, ())
    if not is_there or not is_ending(state, state.jobs[state.attempts[attempt_id].job_id]):
        return False
    machine = state.pool_for(claim.reservation).machines.get(node)
    demands = dict.fromkeys(share.demand for share in claim.shares if share.node == node)
    return machine is None or any(not can_hold(machine, demand) for demand in demands)


def _has_withheld_device(machine: Machine, share: ClaimedShare) -> bool:
    """Return whether its node reports devices as busy that no attempt has."""
    kind = share.demand.device_kind
    return bool(share.demand.device_count) and any(machine.device_places[id_][0][0] == kind for id_ in machine.withheld)


def _has_leaving_unit(state: Tables, node: NodeName) -> bool:
    """Return whether a unit of a reservation is being released."""
    reservations = (state.reservations[name] for name in state.reservations_on.get(node, ()))
    return any(node in unit.nodes for row in reservations for unit in row.leaving_units)


def try_preempt(
    state: State, out: EffectBuffer, applicant: Applicant, holds: MachineHolds | None, plan: StartPlan | None
) -> bool:
    """End jobs for an applicant that does not fit, if that is allowed and helps; return whether it did."""
    rule = state.policy.preemption
    if applicant.kind is ApplicantKind.GROWTH or applicant.shape.request.is_weightless:
        return False
    claim = state.claims.get(applicant.id)
    # One claim at a time: no second job ends for a need that is being served.
    if claim is not None:
        if is_claim_pending(state, claim):
            # No event may come when the time for the release of devices is up: the timer makes the next check.
            if state.now < claim.made_at + DEVICE_RELEASE_S:
                state.timers.set(("seek", applicant.id), claim.made_at + DEVICE_RELEASE_S)
            return False
        state.drop_claim(claim.applicant)  # all victims have ended, but the applicant still does not fit
    # It starts soon enough without ending any work.
    if plan is not None and plan.at is not None and plan.at <= state.now + rule.patience_s:
        return False
    if not rule.enabled or not bands_below(state, applicant):
        return False
    if state.search_backoffs.get(_search_key(state, applicant), NOT_SEARCHED)[0] > state.now:
        return False
    # The others are searched in the next steps: the controller answers requests in between.
    if state.queue.has_spent_work:
        state.timers.set(("seek", applicant.id), state.now + NEXT_STEP_S)
        return False
    # In order of what is lost: machines on their way, surplus units of reservations, and only then whole jobs.
    wait_s = _machine_wait_s(state, applicant)
    choice = None
    if not wait_s and not surplus_suffices(state, applicant):
        # Machines held for other applicants are closed: victims there would make room for those.
        held = _nodes_held_before(state, applicant) if holds is None else holds.nodes_held_for_others(applicant)
        try:
            choice = _continue_search(state, applicant, held)
        except SearchPaused:
            state.timers.set(("seek", applicant.id), state.now + NEXT_STEP_S)
            return False
    if choice is None or not choice.units:
        _back_off(state, applicant, wait_s)
        return False
    _preempt_victims(state, out, applicant, choice)
    state.queue.preemption_candidates[state.queue.lane_of(applicant)] = None  # for the applicants behind it
    return True


def _nodes_held_before(state: Tables, applicant: Applicant) -> dict[NodeName, None]:
    """Return machines that the last pass held for other applicants of its band and earlier ones."""
    queue = state.queue
    others = [name for name in queue.held_machines if name != applicant.id and name in queue]
    before = [name for name in others if queue.applicants[name].band.rank <= applicant.band.rank]
    return {node: None for name in before for node in queue.held_machines[name].nodes}


def _search_key(state: Tables, applicant: Applicant) -> SearchKey:
    """Return a key of applicants whose searches find the same, except for their own owners."""
    entitled = applicant.tenant if may_reclaim(state, applicant) else None
    return applicant.shape, applicant.band, entitled


def _back_off(state: Tables, applicant: Applicant, wait_s: float) -> None:
    """Schedule the next search: when machines may have come, or after a pause that grows each time."""
    key = _search_key(state, applicant)
    if len(state.search_backoffs) > MAX_BACKOFFS:
        state.search_backoffs = {key: one for key, one in state.search_backoffs.items() if one[0] > state.now}
    # Nothing announces that a search would find victims now, except for the end of the next shield.
    pause_s = min(MAX_RETRY_SEARCH_S, max(RETRY_SEARCH_S, 2 * state.search_backoffs.get(key, NOT_SEARCHED)[1]))
    at = state.now + (wait_s or max(RETRY_SEARCH_S, min(pause_s, _shield_ends_in_s(state, applicant))))
    state.search_backoffs[key] = at, 0.0 if wait_s else pause_s
    state.timers.set(("seek", applicant.id), at)


def _shield_ends_in_s(state: Tables, applicant: Applicant) -> float:
    """Return seconds until the next possible victim loses its shield."""
    shield_s = state.policy.preemption.shield_s
    lines = [state.running_by_band[band] for band in bands_below(state, applicant)]
    # Lines are in the order of placement: the first entry behind the boundary loses its shield next.
    nexts = [bisect_right(line, state.now - shield_s, key=lambda entry: entry[0]) for line in lines]
    ends = (line[at][0] + shield_s for line, at in zip(lines, nexts, strict=True) if at < len(line))
    return min(ends, default=math.inf) - state.now


def _machine_wait_s(state: Tables, applicant: Applicant) -> float:
    """Return seconds to wait for machines that may come for it; 0 for no wait."""
    books, now = state.fleet, state.now
    if applicant.shape.reservation or not any(config.provider != "fixed" for config in books.configs()):
        return 0.0
    # The autoscaler has the time of one plan to request machines before any job ends.
    asked_s = applicant.waiting_since + MACHINE_REQUEST_S - now
    why = f"for {applicant.id}"
    coming = [unit.requested_at for unit in books.units.values() if unit.phase in ON_ITS_WAY and unit.reason == why]
    coming_s = max(coming, default=-math.inf) + state.policy.preemption.machine_wait_s - now
    return max(asked_s, coming_s, 0.0)


def search_for_candidates(state: State, out: EffectBuffer) -> None:
    """Search victims for applicants that the pass did not try, which only looks at the first of each shape."""
    queue = state.queue
    while queue.preemption_candidates and not queue.has_spent_work:
        lane = next(iter(queue.preemption_candidates))
        del queue.preemption_candidates[lane]
        _search_in_lane(state, out, lane)
    if queue.preemption_candidates:
        continue_next_step(state)


def continue_next_step(state: State) -> None:
    """Cause a step that does the rest of what is too much for this one."""
    # The empty id names no applicant: that step continues with the candidates, and with the pass.
    state.timers.set(("seek", ""), state.now + NEXT_STEP_S)


def _search_in_lane(state: State, out: EffectBuffer, lane: TenantShapeQueue) -> None:
    """Search for one applicant after another, until a search fails."""
    for entry in lane.entries:
        applicant = state.queue.applicants[entry[-1]]
        claim = state.claims.get(applicant.id)
        if claim is None or not is_claim_pending(state, claim):
            try_preempt(state, out, applicant, None, state.start_plans.get(applicant.id))
            return  # a successful search has added the queue to the candidates again


def retry_preemption(state: State, out: EffectBuffer, applicant_id: str) -> None:
    """Search again after a failed search."""
    applicant = state.queue.applicants.get(applicant_id)
    if applicant is not None:
        state.queue.preemption_candidates[state.queue.lane_of(applicant)] = None


def _preempt_victims(state: State, out: EffectBuffer, applicant: Applicant, choice: PreemptionChoice) -> None:
    shares = shares_of(applicant.shape.request, choice.placed)
    claimed = [ClaimedShare(node=node, demand=d, members=n) for node, demands in shares.items() for d, n in demands]
    state.put_claim(
        CapacityClaim(
            applicant=applicant.id,
            reservation=applicant.shape.reservation,
            shares=tuple(claimed),
            victims=choice.victims,
            made_at=state.now,
        )
    )
    state.timers.set(("seek", applicant.id), state.now + DEVICE_RELEASE_S)
    whose = applicant.id if applicant.id in state.jobs else ""
    out.log_event(whose, "preempts", ("" if whose else f"{applicant.id}: ") + job_list_text(choice.victims))
    rule = state.policy.preemption
    for job in (root for unit in choice.units for root in unit.roots):
        lost = _lost_text(state, job)
        # Only times that still count, so that the row stays small.
        job.preempted_at = (*recent_preemptions(job, rule, state.now), state.now)
        job.preempted_for = applicant.id
        preempt_job(state, out, job, f"for {applicant.id} ({applicant.band.value}); {lost}")
    # The choice may count on surplus units of the claimed machines, see `_search_victims`.
    if not applicant.shape.reservation and state.with_surplus:
        _request_surplus(state, out, applicant, list(shares))


def _request_surplus(state: State, out: EffectBuffer, applicant: Applicant, nodes: Sequence[NodeName]) -> None:
    """Release surplus units on claimed machines, as far as that is necessary beside the victims."""
    spare = [
        surplus for surplus in reclaimable_units(state, applicant) if not set(nodes).isdisjoint(surplus.unit.nodes)
    ]
    for node in nodes:
        for surplus in spare:
            # Checked again before each unit, as units that are leaving count: no more of them leave than the claims
            # need.
            if _holds_all_claims(state, node):
                break
            if node in surplus.unit.nodes and not surplus.unit.leaving:
                request_release(state, out, surplus.reservation, surplus.unit, f"{applicant.id} needs it")


def _holds_all_claims(state: State, node: NodeName) -> bool:
    """Return whether the machine will have room for all claims together."""
    room = capacity_after_pending(state, state.pool.machines[node], "")
    shares = (share for claim in state.claims.values() if not claim.reservation for share in claim.shares)
    return all(room.take(share.demand) for share in shares if share.node == node for _ in range(share.members))


def _lost_text(state: State, job: JobRow) -> str:
    times = f" of {job.spec.members} members" if job.spec.members > 1 else ""
    since = " since its checkpoint" if job.checkpoint is not None else ""
    owned = [child.job_id for child in descendants(state, job)]
    also = f", and all of {job_list_text(owned)}" if owned else ""
    return f"lost: {lost_work_s(state, job):.4g} s{times}{since}{also}"


def job_list_text(job_ids: Sequence[str]) -> str:
    return list_text(job_ids, VICTIMS_SHOWN)
