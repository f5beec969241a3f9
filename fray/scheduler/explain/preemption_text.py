"""Who makes room for whom, in words: for what waits, and for what is kept from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fray.scheduler.backfill.start_plan import claim_shares
from fray.scheduler.pool.pool import can_hold
from fray.scheduler.pool.requests import Shares
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.state.tables import Tables

NAMED = 4
LOOKED = 20
"""Machines that are kept for somebody, and looked at."""


def preempting_text(state: Tables, applicant: Applicant) -> str:
    """Whose places it takes; empty: nobody's."""
    claim = state.claims.get(applicant.id)
    if claim is None:
        return ""
    left = [job_id for job_id in claim.victims if job_id in state.ending_jobs]
    when = (
        f"starts when {capacity_text(left)} {verb_have(left)} ended"
        if left
        else "starts as soon as all its machines are free"
    )
    return f"takes the place of {capacity_text(claim.victims)}, and {when}: what they leave is kept for it"


def planned(state: Tables, applicant: Applicant) -> str:
    """When and where it starts at the latest, by the limits of others; empty: nobody knows, or others go before it."""
    plan = state.start_plans.get(applicant.id)
    if plan is None or plan.at is None or applicant.id in state.claims:
        return ""
    in_s = max(0.0, plan.at - state.now)
    place = capacity_text(plan.shares)
    return f"planned to start in {in_s:.0f} s at the latest on {place}, which later ones may use until then"


def kept_from(state: Tables, applicant: Applicant) -> str:
    """For whom a machine is kept that it would fit on now; empty: none is."""
    shape = applicant.shape
    if shape.request.is_weightless:
        return ""
    for other, shares, when in _kept(state, applicant):
        pool = state.pool_for(shape.reservation)
        for name in list(shares)[:LOOKED]:
            machine = pool.machines.get(name)
            if machine is not None and any(can_hold(machine, demand) for demand in shape.request.demands):
                return f"what {name} has free is kept for {other}, which {when}"
    return ""


def _kept(state: Tables, applicant: Applicant) -> Iterator[tuple[str, Shares, str]]:
    for claim in state.claims.values():
        if claim.applicant != applicant.id and claim.reservation == applicant.shape.reservation:
            yield claim.applicant, claim_shares(claim), f"takes the place of {capacity_text(claim.victims)}"
    for name, plan in state.start_plans.items() if not applicant.shape.is_child else ():
        other = state.queue.applicants.get(name)
        same = other is not None and other.shape.reservation == applicant.shape.reservation
        if name != applicant.id and same and plan.at is not None and name not in state.claims:
            yield name, plan.shares, f"starts there in {max(0.0, plan.at - state.now):.0f} s at the latest"


def capacity_text(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def verb_have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"
