"""Who is ended for the sake of others: seldom, whole, announced, and never again and again.

The law. An applicant that does not fit, and will not within ``patience_s`` by what is known, takes the places of others
- of later bands, if its own is one that the policy names (`Preemption.bands`);
- that have borrowed what its tenant is entitled to (reclaim), of its own band or later ones.

Whose end makes room is chosen by `victims`. Left alone are: who is not preemptible, who has had his machines for less
than ``shield_s``, who was ended so ``limit`` times within ``period_s``, and whoever the applicant belongs to. So no job
is ended for the sake of others more than ``limit`` times in any ``period_s``, whatever comes.

What becomes free is claimed: kept for the applicant until it has its places, waits no more, or a machine of it is gone.
So nobody else takes it, and nobody else is ended for the same need. The claim is a row: it outlives the controller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence

from fray.model.ids import JobId, NodeName
from fray.model.policy.policy import Preemption
from fray.model.policy.priority import Band
from fray.scheduler.backfill.backfill import MachineHolds, capacity_after_pending
from fray.scheduler.backfill.start_plan import is_ending
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.jobs.transitions import preempt_job
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.pool.pool import Machine, fit
from fray.scheduler.pool.requests import shares_of
from fray.scheduler.preemption.cost import (
    ancestors,
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
from fray.scheduler.state.rows import CapacityClaim, ClaimedShare, JobRow
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import SearchKey, Tables
from fray.scheduler.state.unit_rows import ON_ITS_WAY
from fray.scheduler.state.what_if_pool import HypotheticalPool

RETRY_SEARCH_S, MAX_RETRY_SEARCH_S = 5.0, 40.0
"""A search that found nobody is made again after this time, doubled each time: shields end, and counts fall."""
NEXT_STEP_S = 0.1
"""What is too much for one step is done in another."""
DEVICE_RELEASE_S = 60.0
"""Devices may be held for a while by what is left of a victim's processes: so long they still count as coming."""
NOT_SEARCHED = (-math.inf, 0.0)
MAX_TRIES = 8
"""Searches for one applicant, each without somebody who has given back enough."""
VICTIMS_SHOWN = 4
"""Victims that a sentence names."""
MAX_SEARCHES = 8
"""So many look for victims in one step; each `WORK` jobs looked at count as one more, and each `CLAIMS` claims, which
every search plays through first."""
JOBS_PER_SEARCH, CLAIMS_PER_SEARCH = 400, 8
MAX_BACKOFFS = 10_000
MACHINE_REQUEST_S = 3.0
"""Machines that may come for an applicant are asked for within this time."""


# Who may be ended -----------------------------------------------------------------------------------------------------


def recent_preemptions(job: JobRow, rule: Preemption, now: float) -> tuple[float, ...]:
    """When it was ended for the sake of others, as far as that counts now."""
    return tuple(at for at in job.preempted_at if at > now - rule.period_s)


def protection_reason(state: Tables, job: JobRow) -> str:
    """Why nobody may take its place now, in words; empty: somebody may."""
    rule = state.policy.preemption
    if not rule.enabled:
        return "nobody's place is taken here"
    if not job.spec.demand.preemptible:
        return "it is not preemptible"
    ran_s = state.now - (job.placed_at or 0.0)
    if ran_s < rule.shield_s:
        return f"it started {ran_s:.0f} s ago, and is shielded for {rule.shield_s:g} s"
    times = len(recent_preemptions(job, rule, state.now))
    if times >= rule.limit:
        return f"its place was taken {times} times in the last {rule.period_s:g} s, which is the limit"
    return ""


def is_preemptable_by_band(state: Tables, applicant: Applicant) -> Callable[[JobRow], bool]:
    """Whose place it may take for its band; shields and limits are another matter (`spared`)."""
    may = applicant.band in state.policy.preemption.bands
    return lambda job: may and job.band.rank > applicant.band.rank


def is_preemptable_by(state: Tables, applicant: Applicant) -> Callable[[JobRow], bool]:
    """Whose place it may take, for its band or for what its tenant is entitled to."""
    of_band = is_preemptable_by_band(state, applicant)
    if not may_reclaim(state, applicant):
        return of_band
    given, rank = usage_after_pending(state), applicant.band.rank
    return lambda job: of_band(job) or (job.band.rank >= rank and given.is_borrowing(job))


def is_victim_for(state: Tables, applicant: Applicant) -> Callable[[JobRow], bool]:
    """Who may be ended for its sake, with all that is his."""
    may = is_preemptable_by(state, applicant)
    own = state.job_of(applicant)
    above = {job.job_id for job in ancestors(state, own)} if own is not None else set()

    def is_eligible(job: JobRow) -> bool:
        if job.spec.reservation_id != applicant.shape.reservation:
            return False
        return all(map(may_be_ended, roots_of(state, job)))

    def may_be_ended(job: JobRow) -> bool:
        if job.job_id in above or job.stop_cause is not None or not may(job) or protection_reason(state, job):
            return False
        return all(child.spec.demand.preemptible and may(child) for child in descendants(state, job))

    return is_eligible


def bands_below(state: Tables, applicant: Applicant) -> list[Band]:
    """Where victims may be, the latest first, and only where anybody runs."""
    rule, rank = state.policy.preemption, applicant.band.rank
    first = rank if may_reclaim(state, applicant) else rank + 1 if applicant.band in rule.bands else len(Band)
    return [band for band in reversed(Band) if band.rank >= first and state.running_by_band[band]]


# Looking --------------------------------------------------------------------------------------------------------------


def would_preempt(state: Tables, applicant: Applicant, closed: Container[NodeName] = ()) -> PreemptionChoice | None:
    """Who would be ended for its sake if it were asked for now, and where it would go; None: nobody can be.

    A choice without victims: what is being ended anyway makes room. Changes nothing.
    """
    return _search_victims(state, applicant, closed)[0]


def _search_victims(
    state: Tables, applicant: Applicant, closed: Container[NodeName]
) -> tuple[PreemptionChoice | None, int]:
    """The same, and how many jobs were looked at."""
    bands = bands_below(state, applicant)
    rule, ask = state.policy.preemption, applicant.shape.request
    if not rule.enabled or not bands or applicant.kind is ApplicantKind.GROWTH or ask.is_weightless:
        return None, 0
    if all(name in closed for name in state.pool_for(applicant.shape.reservation).machines):
        return None, 0  # before all that is decided is played through
    with HypotheticalPool(state, applicant.shape.reservation) as trial:
        apply_pending(state, trial, but=applicant.id)
        placed = trial.place(ask, closed)
        if placed is not None:
            return PreemptionChoice((), placed), 0
        choice = _choose_victims(state, trial, applicant, bands, closed)
        spare = reclaimable_units(state, applicant) if choice is None else []
        for lent in spare:  # neither is enough alone, perhaps both are
            for host in lent.unit.hosts:
                trial.free(host.node, lent.reservation.demand_of(lent.unit), host.devices)
        if spare:
            choice = _choose_victims(state, trial, applicant, bands, closed)
        return choice, trial.jobs_examined


def _choose_victims(
    state: Tables, trial: HypotheticalPool, applicant: Applicant, bands: list[Band], closed: Container[NodeName]
) -> PreemptionChoice | None:
    """The cheapest, none of whom gives back more than he has borrowed."""
    may, of_band = is_victim_for(state, applicant), is_preemptable_by_band(state, applicant)
    since = state.now - state.policy.preemption.shield_s
    kept: dict[JobId, None] = {}
    for _ in range(MAX_TRIES):
        ask = applicant.shape.request
        choice = choose_victims(trial, ask, lambda job: job.job_id not in kept and may(job), bands, since, closed)
        if choice is None:
            return None
        wrong = first_not_borrowing(state, [job for unit in choice.units for job in unit.roots], of_band)
        if wrong is None:
            return choice
        kept[wrong.job_id] = None
    return None


def apply_pending(state: Tables, trial: HypotheticalPool, but: str = "") -> None:
    """What is being ended has ended, what is given back is free, and what is claimed by others is taken."""
    for job_id in state.ending_jobs:
        job = state.jobs[job_id]
        trial.end((job, *descendants(state, job)))
    for reservation_id in state.releasing if not trial.reservation else ():
        reservation = state.reservations[reservation_id]
        for unit in (unit for unit in reservation.units if unit.leaving):
            for host in unit.hosts:
                trial.free(host.node, reservation.demand_of(unit), host.devices)
    for claim in state.claims.values():
        mine = claim.applicant != but and claim.reservation == trial.reservation
        for share in claim.shares if mine else ():
            machine = trial.pool.machines.get(share.node)
            for _ in range(share.members):
                grant = fit(share.demand, machine) if machine is not None else None
                if grant is not None:
                    trial.take(grant.node, share.demand, grant.devices, grant.ports)


# Doing ----------------------------------------------------------------------------------------------------------------


def drop_stale_claims(state: State) -> None:
    """Claims that are needed no more, or can no longer come true, are dropped."""
    for claim in list(state.claims.values()):
        served = all(_can_serve_claim(state, share.node, claim.reservation) for share in claim.shares)
        if claim.applicant not in state.queue or not served:
            state.drop_claim(claim.applicant)


def _can_serve_claim(state: State, name: NodeName, reservation: str) -> bool:
    """It takes work, or will soon: it may be silent for a moment, as after a restart of the controller. What is in
    quarantine, or on its way back to a provider or out of a reservation, will not."""
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
    """Something still ends on the machines that are claimed, or one of them is away for a moment."""
    nodes = dict.fromkeys(share.node for share in claim.shares)
    pool = state.pool_for(claim.reservation)
    if not all(node in pool.machines and pool.machines[node].is_open for node in nodes):
        return True
    if any(_has_leaving_unit(state, node) for node in nodes):
        return True
    attempts = (state.attempts[attempt_id] for node in nodes for attempt_id in state.on_node[node])
    if any(is_ending(state, state.jobs[attempt.job_id]) for attempt in attempts):
        return True
    return state.now < claim.made_at + DEVICE_RELEASE_S and any(
        _has_withheld_device(pool.machines[s.node], s) for s in claim.shares
    )


def _has_withheld_device(machine: Machine, share: ClaimedShare) -> bool:
    """Its node says that somebody still has devices of it, which are nobody's by the books."""
    kind = share.demand.device_kind
    return bool(share.demand.device_count) and any(machine.device_places[id_][0][0] == kind for id_ in machine.withheld)


def _has_leaving_unit(state: Tables, node: NodeName) -> bool:
    """A unit of a reservation leaves it, after its notice."""
    reservations = (state.reservations[name] for name in state.reservations_on.get(node, ()))
    return any(unit.leaving and node in unit.nodes for row in reservations for unit in row.units)


def try_preempt(
    state: State, out: EffectBuffer, applicant: Applicant, keeps: MachineHolds | None, plan: StartPlan | None
) -> bool:
    """It does not fit: end others for its sake, if that may be and helps. True: they are being ended."""
    rule = state.policy.preemption
    if applicant.kind is ApplicantKind.GROWTH or applicant.shape.request.is_weightless:
        return False
    claim = state.claims.get(applicant.id)
    if claim is not None:
        if is_claim_pending(state, claim):
            if state.now < claim.made_at + DEVICE_RELEASE_S:
                state.timers.set(("seek", applicant.id), claim.made_at + DEVICE_RELEASE_S)
            return False
        state.drop_claim(claim.applicant)  # all have ended, and it does not fit all the same
    if plan is not None and plan.at is not None and plan.at <= state.now + rule.patience_s:
        return False
    if not rule.enabled or not bands_below(state, applicant):
        return False
    if state.search_backoffs.get(_search_key(state, applicant), NOT_SEARCHED)[0] > state.now:
        return False
    if state.queue.searches >= MAX_SEARCHES:
        state.timers.set(("seek", applicant.id), state.now + NEXT_STEP_S)
        return False
    wait_s = _machine_wait_s(state, applicant)
    choice = None
    if not wait_s and not surplus_suffices(state, applicant):
        kept = _nodes_held_before(state, applicant) if keeps is None else keeps.nodes_held_for_others(applicant)
        choice, work = _search_victims(state, applicant, kept)
        state.queue.searches += 1 + work // JOBS_PER_SEARCH + len(state.claims) // CLAIMS_PER_SEARCH
    if choice is None or not choice.units:
        _back_off(state, applicant, wait_s)
        return False
    _preempt_victims(state, out, applicant, choice)
    state.queue.preemption_candidates[state.queue.lane_of(applicant)] = None  # those behind it
    return True


def _nodes_held_before(state: Tables, applicant: Applicant) -> dict[NodeName, None]:
    """Machines that the last pass kept for others of its band and earlier ones."""
    queue = state.queue
    others = [name for name in queue.held_machines if name != applicant.id and name in queue]
    before = [name for name in others if queue.applicants[name].band.rank <= applicant.band.rank]
    return {node: None for name in before for node in queue.held_machines[name].nodes}


def _search_key(state: Tables, applicant: Applicant) -> SearchKey:
    """Applicants alike find the same, but for their own families."""
    entitled = applicant.tenant if may_reclaim(state, applicant) else None
    return applicant.shape, applicant.band, entitled


def _back_off(state: Tables, applicant: Applicant, wait_s: float) -> None:
    """When it shall look again: when machines may have come, or after a while, longer each time."""
    key = _search_key(state, applicant)
    if len(state.search_backoffs) > MAX_BACKOFFS:
        state.search_backoffs = {key: one for key, one in state.search_backoffs.items() if one[0] > state.now}
    pause_s = min(MAX_RETRY_SEARCH_S, max(RETRY_SEARCH_S, 2 * state.search_backoffs.get(key, NOT_SEARCHED)[1]))
    at = state.now + (wait_s or max(RETRY_SEARCH_S, min(pause_s, _shield_ends_in_s(state, applicant))))
    state.search_backoffs[key] = at, 0.0 if wait_s else pause_s
    state.timers.set(("seek", applicant.id), at)


def _shield_ends_in_s(state: Tables, applicant: Applicant) -> float:
    """Until the next job that might be a victim can be one."""
    shield_s = state.policy.preemption.shield_s
    lines = [state.running_by_band[band] for band in bands_below(state, applicant)]
    nexts = [bisect_right(line, state.now - shield_s, key=lambda entry: entry[0]) for line in lines]
    ends = (line[at][0] + shield_s for line, at in zip(lines, nexts, strict=True) if at < len(line))
    return min(ends, default=math.inf) - state.now


def _machine_wait_s(state: Tables, applicant: Applicant) -> float:
    """How long to wait for machines that may come for it; 0: not at all."""
    books, now = state.fleet, state.now
    if applicant.shape.reservation or not any(config.provider != "fixed" for config in books.configs()):
        return 0.0
    asked_s = applicant.waiting_since + MACHINE_REQUEST_S - now
    why = f"for {applicant.id}"
    coming = [unit.requested_at for unit in books.units.values() if unit.phase in ON_ITS_WAY and unit.reason == why]
    coming_s = max(coming, default=-math.inf) + state.policy.preemption.machine_wait_s - now
    return max(asked_s, coming_s, 0.0)


def search_for_candidates(state: State, out: EffectBuffer) -> None:
    """After a pass, which looks for the first of each kind only: those that came since, and those behind it."""
    queue = state.queue
    while queue.preemption_candidates and queue.searches < MAX_SEARCHES:
        lane = next(iter(queue.preemption_candidates))
        del queue.preemption_candidates[lane]
        if lane.entries:
            _search_in_lane(state, out, lane)
    if queue.preemption_candidates:
        state.timers.set(("seek", ""), state.now + NEXT_STEP_S)


def _search_in_lane(state: State, out: EffectBuffer, lane: TenantShapeQueue) -> None:
    """One after the other, until one finds nobody."""
    for entry in lane.entries:
        applicant = state.queue.applicants[entry[-1]]
        claim = state.claims.get(applicant.id)
        if claim is None or not is_claim_pending(state, claim):
            try_preempt(state, out, applicant, None, state.start_plans.get(applicant.id))
            return  # if it has found somebody, its lane is in question again


def retry_preemption(state: State, out: EffectBuffer, applicant_id: str) -> None:
    """Whoever found nobody looks again."""
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
        job.preempted_at = (*recent_preemptions(job, rule, state.now), state.now)
        job.preempted_for = applicant.id
        preempt_job(state, out, job, f"for {applicant.id} ({applicant.band.value}); {lost}")
    if not applicant.shape.reservation and state.with_surplus:
        _request_surplus(state, out, applicant, list(shares))


def _request_surplus(state: State, out: EffectBuffer, applicant: Applicant, nodes: Sequence[NodeName]) -> None:
    """What is lent on machines that are claimed now, as far as it has to go beside those who are being ended."""
    spare = [lent for lent in reclaimable_units(state, applicant) if not set(nodes).isdisjoint(lent.unit.nodes)]
    for node in nodes:
        for lent in spare:
            if _holds_all_claims(state, node):
                break
            if node in lent.unit.nodes and not lent.unit.leaving:
                request_release(state, out, lent.reservation, lent.unit, f"{applicant.id} needs it")


def _holds_all_claims(state: State, node: NodeName) -> bool:
    """For all claims together, in the end."""
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
    more = f" and {len(job_ids) - VICTIMS_SHOWN} more" if len(job_ids) > VICTIMS_SHOWN else ""
    return ", ".join(job_ids[:VICTIMS_SHOWN]) + more
