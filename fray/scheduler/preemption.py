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

from collections.abc import Callable, Container, Sequence

from fray.model.bands import Band
from fray.model.ids import NodeName
from fray.model.policy import Preemption
from fray.scheduler.backfill import Keeps
from fray.scheduler.jobs import preempt
from fray.scheduler.match import fit
from fray.scheduler.outbox import Outbox
from fray.scheduler.planning import going, shares_of
from fray.scheduler.plans import Plan
from fray.scheduler.queue import Applicant, Kind
from fray.scheduler.rows import Claim, ClaimedShare, Job, NodePhase
from fray.scheduler.state import State
from fray.scheduler.tables import Tables
from fray.scheduler.trial import Trial
from fray.scheduler.victims import Choice, below, choose, lost_s, owners, roots_of

AGAIN_S = 5.0
"""A search that found nobody is made again after this time: shields end, and counts fall."""
TURN_S = 0.25
"""Between those who may look and those who come after them."""
SHOWN = 4
"""Victims that a sentence names."""


# Who may be ended -----------------------------------------------------------------------------------------------------


def recent(job: Job, rule: Preemption, now: float) -> tuple[float, ...]:
    """When it was ended for the sake of others, as far as that counts now."""
    return tuple(at for at in job.preempted if at > now - rule.period_s)


def spared(state: Tables, job: Job) -> str:
    """Why nobody may take its place now, in words; empty: somebody may."""
    rule = state.policy.preemption
    if not rule.enabled:
        return "nobody's place is taken here"
    if not job.spec.demand.preemptible:
        return "it is not preemptible"
    ran_s = state.now - (job.placed_at or 0.0)
    if ran_s < rule.shield_s:
        return f"it started {ran_s:.0f} s ago, and is shielded for {rule.shield_s:g} s"
    times = len(recent(job, rule, state.now))
    if times >= rule.limit:
        return f"its place was taken {times} times in the last {rule.period_s:g} s, which is the limit"
    return ""


def may_take(state: Tables, applicant: Applicant) -> Callable[[Job], bool]:
    """Whose place it may take, band by band; shields and limits are another matter (`spared`)."""
    rule, rank = state.policy.preemption, applicant.band.rank
    by_band = applicant.band in rule.bands

    def may(job: Job) -> bool:
        return by_band and job.band.rank > rank

    return may


def eligible(state: Tables, applicant: Applicant) -> Callable[[Job], bool]:
    """Who may be ended for its sake, with all that is his."""
    may = may_take(state, applicant)
    own = state.job_of(applicant)
    above = {job.job_id for job in owners(state, own)} if own is not None else set()

    def is_eligible(job: Job) -> bool:
        if job.spec.reservation_id != applicant.shape.reservation:
            return False
        return all(map(may_be_ended, roots_of(state, job)))

    def may_be_ended(job: Job) -> bool:
        if job.job_id in above or job.stop_cause is not None or not may(job) or spared(state, job):
            return False
        return all(child.spec.demand.preemptible and may(child) for child in below(state, job))

    return is_eligible


def bands_below(state: Tables, applicant: Applicant) -> list[Band]:
    """Where victims may be, the latest first, and only where anybody runs."""
    rule, rank = state.policy.preemption, applicant.band.rank
    first = rank + 1 if applicant.band in rule.bands else len(Band)
    return [band for band in reversed(Band) if band.rank >= first and state.runs[band]]


# Looking --------------------------------------------------------------------------------------------------------------


def would_preempt(state: Tables, applicant: Applicant, closed: Container[NodeName] = ()) -> Choice | None:
    """Who would be ended for its sake if it were asked for now, and where it would go; None: nobody can be.

    A choice without victims: what is being ended anyway makes room. Changes nothing.
    """
    bands = bands_below(state, applicant)
    rule = state.policy.preemption
    if not rule.enabled or not bands or applicant.kind is Kind.GROWTH or applicant.shape.ask.weightless:
        return None
    with Trial(state, applicant.shape.reservation) as trial:
        as_decided(state, trial, but=applicant.id)
        placed = trial.place(applicant.shape.ask, closed)
        if placed is not None:
            return Choice((), placed)
        since = state.now - rule.shield_s
        return choose(trial, applicant.shape.ask, eligible(state, applicant), bands, since, closed)


def as_decided(state: Tables, trial: Trial, but: str = "") -> None:
    """What is being ended has ended, and what is claimed by others is taken."""
    for job_id in state.ending:
        job = state.jobs[job_id]
        trial.end((job, *below(state, job)))
    for claim in state.claims.values():
        mine = claim.applicant != but and claim.reservation == trial.reservation
        for share in claim.shares if mine else ():
            machine = trial.pool.machines.get(share.node)
            for _ in range(share.members):
                grant = fit(share.demand, machine) if machine is not None else None
                if grant is not None:
                    trial.take(grant.node, share.demand, grant.devices, grant.ports)


# Doing ----------------------------------------------------------------------------------------------------------------


def settle(state: State) -> None:
    """Claims that are needed no more, or can no longer come true, are dropped."""
    for claim in list(state.claims.values()):
        if claim.applicant not in state.queue or not all(_serves(state, share.node) for share in claim.shares):
            state.drop_claim(claim.applicant)


def _serves(state: State, name: NodeName) -> bool:
    """It takes work, or will soon: it may be silent for a moment, as after a restart of the controller."""
    node = state.nodes.get(name)
    return node is not None and node.phase in (NodePhase.ALIVE, NodePhase.SILENT) and node.cordon is None


def is_coming(state: Tables, claim: Claim) -> bool:
    """Something still ends on the machines that are claimed, or one of them is away for a moment."""
    nodes = dict.fromkeys(share.node for share in claim.shares)
    pool = state.pool_for(claim.reservation)
    if not all(node in pool.machines and pool.machines[node].open for node in nodes):
        return True
    attempts = (state.attempts[attempt_id] for node in nodes for attempt_id in state.on_node[node])
    return any(going(state, state.jobs[attempt.job_id]) for attempt in attempts)


def seek(state: State, out: Outbox, applicant: Applicant, keeps: Keeps, plan: Plan | None) -> bool:
    """It does not fit: end others for its sake, if that may be and helps. True: they are being ended."""
    rule = state.policy.preemption
    claim = state.claims.get(applicant.id)
    if claim is not None:
        if is_coming(state, claim):
            return False
        state.drop_claim(claim.applicant)  # all have ended, and it does not fit all the same
    if plan is not None and plan.at is not None and plan.at <= state.now + rule.patience_s:
        return False
    if not bands_below(state, applicant) or state.sought.get(applicant.id, state.now) > state.now:
        return False
    choice = would_preempt(state, applicant, keeps.kept_for_others(applicant))
    if choice is None or not choice.units:
        state.sought[applicant.id] = state.now + AGAIN_S
        state.timers.set(("seek", applicant.id), state.now + AGAIN_S)
        return False
    _take(state, out, applicant, choice)
    return True


def later(state: State, applicant: Applicant, turn: int) -> bool:
    """It may look when others have: searches take time, and the first go first. False: it would not look anyway."""
    if applicant.id in state.claims or not bands_below(state, applicant):
        return False
    if state.sought.get(applicant.id, 0.0) <= state.now:
        at = state.sought[applicant.id] = state.now + TURN_S * (1 + turn)
        state.timers.set(("seek", applicant.id), at)
        return True
    return False


def due(state: State, out: Outbox, applicant_id: str) -> None:
    """Whoever found nobody looks again."""
    state.sought.pop(applicant_id, None)
    if applicant_id in state.queue:
        state.queue.retry(applicant_id)


def _take(state: State, out: Outbox, applicant: Applicant, choice: Choice) -> None:
    shares = shares_of(applicant.shape.ask, choice.placed)
    claimed = [ClaimedShare(node=node, demand=d, members=n) for node, demands in shares.items() for d, n in demands]
    state.put_claim(
        Claim(
            applicant=applicant.id,
            reservation=applicant.shape.reservation,
            shares=tuple(claimed),
            victims=choice.victims,
            made_at=state.now,
        )
    )
    whose = applicant.id if applicant.id in state.jobs else ""
    out.happened(whose, "takes the place of", ("" if whose else f"{applicant.id}: ") + named(choice.victims))
    rule = state.policy.preemption
    for job in (root for unit in choice.units for root in unit.roots):
        lost = _lost(state, job)
        job.preempted = (*recent(job, rule, state.now), state.now)
        job.preempted_for = applicant.id
        job.notice_s = min(job.spec.notice_s, rule.notice_limit_s)
        preempt(state, out, job, f"for {applicant.id} ({applicant.band.value}); {lost}")


def _lost(state: State, job: Job) -> str:
    times = f" of {job.spec.members} members" if job.spec.members > 1 else ""
    since = " since its checkpoint" if job.checkpoint is not None else ""
    owned = [child.job_id for child in below(state, job)]
    also = f", and all of {named(owned)}" if owned else ""
    return f"lost: {lost_s(state, job):.4g} s{times}{since}{also}"


def named(job_ids: Sequence[str]) -> str:
    more = f" and {len(job_ids) - SHOWN} more" if len(job_ids) > SHOWN else ""
    return ", ".join(job_ids[:SHOWN]) + more
