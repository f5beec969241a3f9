"""When and where a waiting one fits at the latest, by the time limits of what runs (see `backfill`)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.asks import Ask, Placed
from fray.scheduler.fitting import held_empty
from fray.scheduler.match import Pool
from fray.scheduler.plans import Plan, Shares
from fray.scheduler.queue import Applicant, Shape
from fray.scheduler.rows import Claim, Job, JobPhase
from fray.scheduler.tables import Tables
from fray.scheduler.trial import Trial

MARGIN_S = 10.0
"""From the end of a job's ladder until its machines are surely free: sweeping, reporting."""
ENDS = 512
"""So many ends to come are looked at for one plan."""
LOOKED = 1024
"""Among so many of the jobs whose time is over soonest."""


def pool_of(state: Tables, shape: Shape) -> Pool:
    """Whose machines it takes."""
    return state.pool_for(shape.reservation)


# Times ----------------------------------------------------------------------------------------------------------------


def rungs_s(job: Job) -> float:
    """From the request to the last rung of its ladder."""
    return job.spec.ladder.cancel_s + job.spec.ladder.term_s + MARGIN_S


def ends_at(state: Tables, job: Job) -> float | None:
    """When its machines are free at the latest, as far as that is known. It may be later: machines fall silent."""
    if job.phase is JobPhase.CLOSING:
        return max(job.first_at + job.notice_s + rungs_s(job), state.now)
    return None if job.over_at is None else max(job.over_at + rungs_s(job), state.now)


def over_in_s(state: Tables, applicant: Applicant) -> float | None:
    """From its start until its machines are free again; None: nobody knows."""
    if applicant.time_limit_s is None:
        return None
    job = state.job_of(applicant)
    return applicant.time_limit_s + (rungs_s(job) if job is not None else MARGIN_S)


def going(state: Tables, job: Job) -> bool:
    """Its end is decided, or that of a job it is owned by."""
    seen: Job | None = job
    while seen is not None:
        if seen.phase is JobPhase.CLOSING:
            return True
        owner = state.attempts.get(seen.owner)
        seen = state.jobs.get(owner.job_id) if owner is not None else None
    return False


# Plans ----------------------------------------------------------------------------------------------------------------


def make_plan(state: Tables, applicant: Applicant, closed: Container[NodeName] = ()) -> Plan:
    """The earliest time at which it surely fits, if the time limits tell one."""
    pool, ask = pool_of(state, applicant.shape), applicant.shape.ask
    ends = _ends(state, applicant.shape, closed)
    with Trial(state, applicant.shape.reservation) as trial:
        count = _fewest(trial, ask, closed, ends)
        if count is None:
            return Plan(applicant.id, state.now, pool.open_machines)
        trial.end(job for _, job in ends[len(trial.ended) : count])
        placed = trial.place(ask, closed)
    assert placed is not None
    after = tuple(job.job_id for _, job in ends[:count] if _on(state, job, nodes_of(placed)))
    at = ends[count - 1][0] if count else state.now
    return Plan(applicant.id, state.now, pool.open_machines, at, shares_of(ask, placed), after)


def _ends(state: Tables, shape: Shape, closed: Container[NodeName]) -> list[tuple[float, Job]]:
    """What will end on machines that it could use, soonest first, as far as that is known."""
    pool, known = pool_of(state, shape), dict[NodeName, bool]()

    def serves(name: NodeName) -> bool:
        if name not in known:
            machine = pool.machines.get(name)
            is_open = machine is not None and machine.open and name not in closed
            known[name] = is_open and any(held_empty(d, pool.machines[name]) for d in shape.ask.demands)
        return known[name]

    jobs = [*state.ending, *(job_id for _, _, job_id in state.limits[:LOOKED])]
    found = []
    for job in (state.jobs[job_id] for job_id in jobs if state.jobs[job_id].spec.reservation_id == shape.reservation):
        at = ends_at(state, job)
        if at is not None and any(serves(attempt.node) for attempt in state.living_members(job)):
            found.append((at, job))
            if len(found) >= ENDS:
                break
    return sorted(found, key=lambda end: (end[0], end[1].order))


def _fewest(trial: Trial, ask: Ask, closed: Container[NodeName], ends: Sequence[tuple[float, Job]]) -> int | None:
    """How many of these ends, the soonest first, make it fit; None: all of them do not. Leaves fewer ended."""
    low, high, stride = 0, 0, 1
    marks = [trial.mark]
    while not trial.fits(ask, closed):
        if high == len(ends):
            return None
        low, high, stride = high, min(len(ends), high + stride), stride * 2
        for _, job in ends[low:high]:
            trial.end((job,))
            marks.append(trial.mark)
    while high - low > 1:  # fits after ``high``, not after ``low``
        middle = (low + high) // 2
        _end_first(trial, ends, marks, middle)
        low, high = (low, middle) if trial.fits(ask, closed) else (middle, high)
    _end_first(trial, ends, marks, low)
    return high


def _end_first(trial: Trial, ends: Sequence[tuple[float, Job]], marks: list[int], count: int) -> None:
    """Exactly the first ``count`` have ended."""
    while len(marks) - 1 > count:
        marks.pop()
    trial.undo_to(marks[-1])
    for _, job in ends[len(marks) - 1 : count]:
        trial.end((job,))
        marks.append(trial.mark)


def _on(state: Tables, job: Job, nodes: Container[NodeName]) -> bool:
    return any(attempt.node in nodes for attempt in state.living_members(job))


def nodes_of(placed: Iterable[Placed]) -> dict[NodeName, None]:
    return {node: None for one in placed for node in one.nodes}


def shares_of(ask: Ask, placed: Sequence[Placed]) -> Shares:
    """What is taken of which machine."""
    found: dict[NodeName, dict[Demand, int]] = {}
    for part, one in zip(ask.parts, placed, strict=True):
        demand = part.choices[one.choice]
        for node in one.nodes:
            here = found.setdefault(node, {})
            here[demand] = here.get(demand, 0) + 1
    return {node: tuple(demands.items()) for node, demands in found.items()}


def claim_shares(claim: Claim) -> Shares:
    found: dict[NodeName, list[tuple[Demand, int]]] = {}
    for share in claim.shares:
        found.setdefault(share.node, []).append((share.demand, share.members))
    return {node: tuple(demands) for node, demands in found.items()}
