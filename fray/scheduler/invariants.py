"""What is true of the law's memory after every step, whatever happened: `check` names each sentence that is broken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from attrs import Factory, define, evolve

from fray.model.fleet import MachineState
from fray.model.gangs import port_names
from fray.model.ids import split_attempt
from fray.model.specs import Cause, JobState, Outcome
from fray.scheduler import quarantine
from fray.scheduler.attempt_tables import Tally
from fray.scheduler.backfill import room_in_the_end
from fray.scheduler.group_invariants import job_groups_are_sound
from fray.scheduler.lifecycle import BUDGETS, Budget, job_state
from fray.scheduler.match import Machine
from fray.scheduler.musters import Muster
from fray.scheduler.quotas import ceiling, excess, limits
from fray.scheduler.reserved_rules import RESERVATION_RULES, devices_add_up, units_by_node
from fray.scheduler.restarts import begins_with, concerns, limit, own_restarts, policy, spent
from fray.scheduler.rows import TABLES, Attempt, AttemptPhase, Job, JobPhase, NodePhase, SessionPhase
from fray.scheduler.service import takes_work
from fray.scheduler.slice_rules import slices_are_whole
from fray.scheduler.space import Space
from fray.scheduler.state import State
from fray.scheduler.tables import Tables
from fray.scheduler.units import UnitPhase
from fray.scheduler.waits import waits_for

Rule = Callable[[State], Iterator[str]]


def check(state: State, *, thorough: bool = True) -> list[str]:
    """Broken sentences; empty when the memory is sound. Cost grows with all rows: for tests.

    Args:
        thorough: also build every index anew from the rows and compare, and look at jobs that have ended: most of
            the cost. What is broken there stays broken, so that it is enough to look now and then.
    """
    rules = RULES if thorough else RULES_OF_THE_LIVING
    return [sentence for rule in rules for sentence in rule(state)]


@define
class Decided:
    """What was decided once stays so: what no single state shows. Told of states in their order."""

    outcomes: dict[tuple[str, int], Outcome] = Factory(dict)
    """Of jobs and attempts, with the order of the job: an id that was forgotten may be used again."""

    def check(self, state: State) -> list[str]:
        """Jobs and attempts that have another outcome than they had, in words."""
        jobs = ((job_id, job.order, job.outcome) for job_id, job in state.jobs.items())
        attempts = ((id_, state.jobs[one.job_id].order, one.outcome) for id_, one in state.attempts.items())
        return [sentence for one in (*jobs, *attempts) for sentence in self._one(*one)]

    def _one(self, name: str, order: int, now: Outcome | None) -> Iterator[str]:
        before = self.outcomes.get((name, order))
        if now is before:
            return
        if before is not None and (now is None or now != _kept(before, now)):
            yield f"{name} had the outcome {before}, and has {now}"
        elif now is not None:
            if before is not None and now.value not in (None, before.value):  # they are dropped when nobody needs them
                yield f"{name} had the value {before.value}, and has {now.value}"
            self.outcomes[name, order] = now


def _kept(before: Outcome, now: Outcome) -> Outcome:
    """An outcome without what is kept for a while only: its value, and the stacks of its last moments."""
    size_bytes = before.value_bytes if now.value else now.value_bytes
    captured = before.captured if now.captured else ""
    return evolve(before, value=now.value, value_bytes=size_bytes, captured=captured)


# Machines -------------------------------------------------------------------------------------------------------------


def _capacity(state: State) -> Iterator[str]:
    """Free capacity is what living attempts leave, never negative, and no device is given twice."""
    living = _living_by_node(state)
    shares = units_by_node(state)
    for node in state.nodes.values():
        fresh = Machine.empty(node.name, node.capacity)
        held = [attempt for attempt in living[node.name] if not state.jobs[attempt.job_id].spec.reservation_id]
        units = shares[node.name]
        demands = [*(state.demand(state.jobs[a.job_id]) for a in held), *(demand for demand, _ in units)]
        free = (
            fresh.cpu_milli - sum(d.cpu_milli for d in demands),
            fresh.memory_bytes - sum(d.memory_bytes for d in demands),
            fresh.disk_bytes - sum(d.disk_bytes for d in demands),
        )
        machine = state.pool.machines[node.name]
        if min(free) < 0:
            yield f"node {node.name} is given away more than once: {free} left"
        if free != (machine.cpu_milli, machine.memory_bytes, machine.disk_bytes) or machine.attempts != len(demands):
            yield f"the pool thinks otherwise of node {node.name}"
        if machine.open != takes_work(node):
            yield f"the pool has node {node.name} open={machine.open}"
        reserved = [device for _, host in units for device in host.devices]
        yield from devices_add_up(state, held, machine, reserved)


def _ports(state: State) -> Iterator[str]:
    """Every living attempt has the ports it asked for, of those its machine offers, and no other one has them."""
    given: dict[tuple[str, int], str] = {}
    for attempt in state.attempts.values():
        spec, node = state.jobs[attempt.job_id].spec, state.nodes.get(attempt.node)
        if not attempt.living or node is None:
            continue
        asked = port_names(spec)[: spec.demand.ports]
        if sorted(attempt.ports) != sorted(asked):
            yield f"{attempt.attempt_id} asked for ports {asked} and has {attempt.ports}"
        for port in attempt.ports.values():
            other = given.setdefault((node.name, port), attempt.attempt_id)
            if other != attempt.attempt_id or not 0 <= port - node.capacity.ports.first < node.capacity.ports.count:
                yield f"port {port} of {node.name} is given to {other} and to {attempt.attempt_id}"
    for node in state.nodes.values():
        mine = sorted(port for name, port in given if name == node.name)
        if mine != sorted(state.pool.machines[node.name].ports.given):
            yield f"the pool thinks otherwise of the ports of {node.name}"


def _nodes(state: State) -> Iterator[str]:
    """Timers run for exactly those that are not alive; lost machines hold nothing."""
    unwell = sorted(node.name for node in state.nodes.values() if node.phase is not NodePhase.ALIVE)
    if unwell != sorted(state.unwell):
        yield f"nodes without connection are {unwell}, timers run for {sorted(state.unwell)}"
    for node in state.nodes.values():
        if node.phase is NodePhase.LOST and state.on_node[node.name]:
            yield f"the lost node {node.name} still holds {list(state.on_node[node.name])}"


def _cordons(state: State) -> Iterator[str]:
    """Nothing new comes to a cordoned machine; what is on a draining one is being ended once its time is over; and a
    drained one holds nothing."""
    by_node = _living_by_node(state)
    for node in state.nodes.values():
        cordon = node.cordon
        if cordon is None:
            continue
        for attempt in by_node[node.name]:
            if attempt.placed_at > cordon.since:
                yield f"{attempt.attempt_id} was placed on {node.name}, which is cordoned since {cordon.since}"
            if cordon.drain and cordon.until is None and not attempt.stop_cause:
                yield f"{attempt.attempt_id} stays on {node.name}, which is drained"
        if cordon.drained_at is not None and by_node[node.name]:
            yield f"{node.name} counts as drained and holds {[one.attempt_id for one in by_node[node.name]]}"
        if cordon.drain and cordon.drained_at is None and not by_node[node.name]:
            yield f"{node.name} holds nothing and does not count as drained"


def _fleet(state: State) -> Iterator[str]:
    """Units are asked for within max and the spend limit, closed while they leave, and deleted only when empty."""
    books = state.fleet
    for config in books.configs():
        made = [
            unit for unit in books.live(config.name) if unit.wanted_at == state.now and unit.phase is UnitPhase.WANTED
        ]
        if made and len(books.live(config.name)) > config.max:
            yield f"{made[-1].name} was asked for, and group {config.name} has {config.max} units at most"
    limit = books.policy.spend_limit_per_hour
    new = [unit for unit in books.units.values() if unit.phase is UnitPhase.WANTED and unit.wanted_at == state.now]
    if limit is not None and any(unit.price_per_hour for unit in new) and books.spent_per_hour() > limit + 1e-6:
        yield f"{new[-1].name} was asked for, and {books.spent_per_hour():g} an hour is over the limit of {limit:g}"
    for unit in books.units.values():
        nodes = [state.nodes[name] for name in books.nodes.get(unit.name, ())]
        if not unit.live and any(state.pool.machines[node.name].open for node in nodes):
            yield f"{unit.name} is {unit.phase.value}, and open for work"
        if unit.phase is UnitPhase.DELETING and unit.state is not MachineState.DELETING and not unit.tries:
            held = [attempt for node in nodes for attempt in state.on_node[node.name]]
            if held:
                yield f"{unit.name} is being deleted, and holds {held}"


def _quarantine(state: State) -> Iterator[str]:
    """No job alone puts a machine there, nothing new comes, and not more than a share of all machines is there."""
    yield from quarantine.broken(state)


# Attempts -------------------------------------------------------------------------------------------------------------


def _attempts(state: State) -> Iterator[str]:
    """A living attempt is held by the living incarnation of its node, for the generation its job is in."""
    for attempt in state.attempts.values():
        job = state.jobs.get(attempt.job_id)
        node = state.nodes.get(attempt.node)
        if job is None:
            yield f"{attempt.attempt_id} is on record without its job"
        elif attempt.living:
            if node is None or node.incarnation != attempt.incarnation:
                yield f"{attempt.attempt_id} lives on a dead incarnation of {attempt.node}"
            if attempt.generation != job.generation:
                yield f"{attempt.attempt_id} outlives its generation"
            if job.ended and not (state.suspect(attempt) or attempt.stop_cause):
                yield f"{attempt.attempt_id} outlives its job"
        if (attempt.outcome is None) is not attempt.living:
            yield f"{attempt.attempt_id} is {attempt.phase.value} with outcome {attempt.outcome}"


def _wishes(state: State) -> Iterator[str]:
    """Every node is asked for its living attempts and for nothing else, but for those whose stage has not come."""
    by_node = _living_by_node(state)
    for node in state.nodes:
        wanted = [wish.attempt_id for wish in state.wanted(node)]
        living = [attempt.attempt_id for attempt in by_node[node] if attempt.phase is not AttemptPhase.KEPT]
        if sorted(wanted) != sorted(living):
            yield f"node {node} is asked for {wanted}, living there: {living}"


def _living_by_node(state: State) -> defaultdict[str, list[Attempt]]:
    """As the rows say, and not the index."""
    living: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in state.attempts.values():
        if attempt.living:
            living[attempt.node].append(attempt)
    return living


# Jobs -----------------------------------------------------------------------------------------------------------------


def _jobs(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        yield from (f"{job.job_id}: {sentence}" for sentence in _job(state, job))


def _living_jobs(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        if not job.ended:
            yield from (f"{job.job_id}: {sentence}" for sentence in _job(state, job))


def _job(state: State, job: Job) -> Iterator[str]:
    """Gangs are whole, budgets are kept, phases and outcomes agree, and the dead own nothing."""
    members, living = state.members(job), state.living_members(job)
    placed = job.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.CLOSING)
    if placed and len(members) != job.spec.members:
        yield f"{len(members)} of {job.spec.members} members placed"
    if job.phase is JobPhase.QUEUED and members:
        yield "queued with members placed"
    if (job.phase is JobPhase.QUEUED) is not (job.job_id in state.queue):
        yield f"{job.phase.value}, and in the queue: {job.job_id in state.queue}"
    yield from _held(state, job)
    if job.ended is not (job.outcome is not None) or (job.phase is JobPhase.CLOSING) is not (job.first is not None):
        yield f"{job.phase.value} with outcome {job.outcome} and first cause {job.first}"
    if placed and job.phase is not JobPhase.CLOSING and any(a.stop_cause for a in living):
        yield "a member is being stopped while the job goes on"
    if job.phase is JobPhase.CLOSING and not all(a.stop_cause for a in living):
        yield "closing, and a member has not been asked to stop"
    if job.phase is JobPhase.RUNNING and not all(a.ran for a in members):
        yield "running, and not every member has been seen running"
    if job.outcome and job.outcome.cause is Cause.GANG:
        yield "ended by its own gang"
    if placed and not living and job.phase is not JobPhase.CLOSING:
        yield "goes on without a living member"
    kept = job.checkpoint
    if kept is not None and (job.ended or split_attempt(kept.attempt_id)[:1] != (job.job_id,)):
        yield f"keeps a checkpoint of {kept.attempt_id} and is {job.phase.value}"
    if kept is not None and split_attempt(kept.attempt_id)[1] > job.generation:
        yield f"keeps a checkpoint of {kept.attempt_id}, which is still to come"
    yield from _budgets(job)
    yield from _owner(state, job)


def _limits(state: State) -> Iterator[str]:
    """No job runs when its time is over, and whoever has a limit has a timer."""
    for job in state.jobs.values():
        if job.runs and job.over_at is not None and job.over_at <= state.now:
            yield f"{job.job_id} runs on, though its time was over at {job.over_at}"


def _preemption(state: State) -> Iterator[str]:
    """Nobody is ended for the sake of others too often, and claims are those of waiting ones, on open machines."""
    for job in state.jobs.values():
        if job.preempted:
            yield from _too_often(state, job)
    for claim in state.claims.values():
        if claim.applicant not in state.queue:
            yield f"{claim.applicant} has a claim, and does not wait"
        if not claim.shares or not claim.victims:
            yield f"{claim.applicant} claims {len(claim.shares)} shares of {len(claim.victims)} victims"
        for share in claim.shares:
            if share.node not in state.pool.machines:
                yield f"{claim.applicant} claims something of {share.node}, which is gone"
    yield from _promised_once(state)


def _too_often(state: State, job: Job) -> Iterator[str]:
    rule = state.policy.preemption
    if list(job.preempted) != sorted(job.preempted) or job.preempted[-1] > state.now:
        yield f"{job.job_id} was preempted at {job.preempted}"
    for at in job.preempted:
        times = sum(at - rule.period_s < other <= at for other in job.preempted)
        if times > rule.limit:
            yield f"{job.job_id} was preempted {times} times in {rule.period_s:g} s, the limit is {rule.limit}"
    if job.runs and job.preempted[-1] > (job.placed_at or 0.0):
        yield f"{job.job_id} goes on, and was preempted at {job.preempted[-1]}"


def _promised_once(state: State) -> Iterator[str]:
    """What is free, or will be when all has ended that is being ended, is enough for all claims together."""
    rooms: dict[tuple[str, str], Space] = {}
    for claim in state.claims.values():
        for share in claim.shares:
            machine = state.pool_for(claim.reservation).machines.get(share.node)
            if machine is None:
                continue
            key = claim.reservation, share.node
            if key not in rooms:
                rooms[key] = room_in_the_end(state, machine, claim.reservation)
            room = rooms[key]
            if not all(room.take(share.demand) for _ in range(share.members)):
                yield f"{claim.applicant} claims more of {share.node} than there will be"


def _held(state: State, job: Job) -> Iterator[str]:
    """A held job waits for something; what waits for a time has an alarm."""
    alarm = (job.held_until, job.order, job.job_id)
    held = job.job_id in state.held or alarm in state.alarms
    if job.gathered and (held or job.phase is not JobPhase.HELD):
        yield f"{job.phase.value}, and gathered with its group, held: {held}"
    if (job.phase is JobPhase.HELD) is not (held or job.gathered):
        yield f"{job.phase.value}, and held: {job.job_id in state.held}, with an alarm: {alarm in state.alarms}"
    if job.phase is not JobPhase.HELD:
        goes_on = job.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING)
        if goes_on and job.held_until is not None and job.held_until > state.now:
            yield f"{job.phase.value}, and its back-off lasts until {job.held_until}"
        return
    over = job.held_until is None or job.held_until <= state.now
    if over and not job.gathered and next(waits_for(state, job), None) is None:
        yield "held for nothing"
    if state.members(job):
        yield "held with members placed"


def _alone_with_its_name(state: State) -> Iterator[str]:
    """Of the jobs that want a name for themselves one at most is placed or in the queue; the next waits for its end."""
    for (_, name), holders in state.named.items():
        active = [job_id for job_id in holders if state.jobs[job_id].phase is not JobPhase.HELD]
        for job_id in active:
            earlier = [other for other in holders if state.jobs[other].order < state.jobs[job_id].order]
            if earlier and state.jobs[job_id].spec.exclusive_name:
                yield f"{job_id} goes on with the name {name}, and {earlier} had it first"


def _groups(state: State) -> Iterator[str]:
    """Siblings begin anew together: none is placed while another is being ended for that; none outlives the group."""
    for name, members in state.groups.items():
        mates = [state.jobs[job_id] for job_id in members]
        leaving = [m for m in mates if m.phase is JobPhase.CLOSING and m.first and m.first.cause is Cause.SIBLING]
        for mate in mates:
            if mate.stop_cause is None and mate.phase in (JobPhase.QUEUED, JobPhase.STARTING) and mate.spec.siblings:
                taken = [m.job_id for m in leaving if m.stop_cause is None and _falls(mate, m) and _fell_with(mate, m)]
                if mate.generation and taken:
                    yield f"{mate.job_id} of group {name} begins anew before {taken} have ended"
        over = [job for job in state.jobs.values() if job.spec.siblings and job.ended and _group(job) == name]
        if any(job_state(job) is JobState.FAILED for job in over) and not all(m.stop_cause for m in mates):
            yield f"group {name} has failed, and a member of it goes on"


def _falls(one: Job, other: Job) -> bool:
    """A restart of ``one`` would have taken ``other`` along."""
    return bool(one.spec.siblings and other.spec.siblings and concerns(one.spec.siblings, other.spec.siblings))


def _fell_with(one: Job, other: Job) -> bool:
    """It did: not with another one that failed after ``one`` had begun anew already."""
    return other.first is not None and other.first.message == begins_with(one)


def _group(job: Job) -> str:
    return job.spec.siblings.group_id if job.spec.siblings else ""


def _budgets(job: Job) -> Iterator[str]:
    """No budget is overspent, and each generation but the first has been paid for."""
    if not job.retried:  # nearly all: this is asked for every job after every step
        if job.generation:
            yield f"generation {job.generation} after no retries"
        return
    config = policy(job)
    for budget in Budget:
        most, used = limit(job.spec, budget), spent(job, budget)
        if config is None and used > (most or 0) >= 0:
            yield f"spent {used} of {most} {budget.value} retries"
    for cause in job.retried:
        if BUDGETS[cause] is None:
            yield f"was retried after {cause.value}, which no budget pays for"
    if config is not None and config.max_restarts is not None and 0 <= config.max_restarts < _most_within(job):
        yield f"was restarted {_most_within(job)} times within {config.restart_period_s} s of {config.max_restarts}"
    if sum(job.retried.values()) != job.generation:
        yield f"generation {job.generation} after retries {job.retried}"


def _most_within(job: Job) -> int:
    """The most restarts on its own account that ever fell into one period."""
    config = policy(job)
    period_s = config.restart_period_s if config else None
    if period_s is None:
        return own_restarts(job)
    return max((sum(at - period_s < other <= at for other in job.restarts) for at in job.restarts), default=0)


def _owner(state: State, job: Job) -> Iterator[str]:
    """A living job has a living owner, or is being ended for the lack of it."""
    if job.ended or not job.owner or job.stop_cause:
        return
    session = state.sessions.get(job.owner)
    if not state.attempt_living(job.owner) and (session is None or session.over):
        yield f"goes on without its owner {job.owner}"


def _indexes(state: State) -> Iterator[str]:
    """Indexes say what the rows say: a state built from the same rows looks the same."""
    rows = [(table, key, row) for table in _TABLES for key, row in state.rows(table).items()]
    twin = Tables(state.now, state.rules)
    twin.load(rows)
    for index in _INDEXES:
        mine, other = _plain(getattr(state, index)), _plain(getattr(twin, index))
        if mine != other:
            yield f"index {index} is {mine}, the rows say {other}"
    if list(state.queue) != list(twin.queue):
        yield f"the queue is {list(state.queue)}, the rows say {list(twin.queue)}"
    if {timed: at for timed, at in state.timers.at.items() if timed[0] != "seek"} != twin.timers.at:
        yield f"timed are {state.timers.at}, the rows say {twin.timers.at}"
    if state.fleet.orders.keys() != twin.fleet.orders.keys():
        yield f"the orders are {list(state.fleet.orders)}, the rows say {list(twin.fleet.orders)}"
    if state.fleet.nodes != twin.fleet.nodes:
        yield f"nodes by unit are {state.fleet.nodes}, the rows say {twin.fleet.nodes}"
    twin.set_policy(state.policy, anew=True)
    yield from _shares(state, twin)
    if state.alarms != twin.alarms:
        yield f"the alarms are {state.alarms}, the rows say {twin.alarms}"
    if state.blobs != state.count_blobs():
        yield f"blobs are counted {state.blobs}, rows refer to {state.count_blobs()}"


def _shares(state: State, twin: Tables) -> Iterator[str]:
    """Every tenant is charged with what its living attempts take, of all machines that are not lost."""
    if state.shares.capacity != twin.shares.capacity:
        yield f"the cluster is counted as {state.shares.capacity}, its machines have {twin.shares.capacity}"
    for key in dict.fromkeys([*state.shares.accounts, *twin.shares.accounts]):
        mine, other = (tables.shares.accounts.get(key) for tables in (state, twin))
        used = [(account.used, account.variants) if account else ([0, 0, 0, 0], {}) for account in (mine, other)]
        if used[0] != used[1]:
            yield f"{key} is charged with {used[0]}, its attempts take {used[1]}"
    for rank, ranks in state.shares.ranks.items():
        if ranks != sorted(ranks) or {user for _, user in ranks} != state.queue.spaces.get(rank, {}).keys():
            yield f"in band {rank} {list(state.queue.spaces.get(rank, ()))} wait, and have turns as {ranks}"
        for score, user in ranks:
            if state.shares.users[user].score != score:
                yield f"{user} has score {state.shares.users[user].score}, and its turn is that of {score}"


def _quotas(state: State) -> Iterator[str]:
    """Nobody has more than his quota and what he may borrow; but for what he had when that was written."""
    shares = state.shares
    for tenant in shares.tenants if shares.has_quotas else ():
        for whose, terms, account in limits(shares, tenant):
            most = ceiling(terms)
            over = excess(account, most) if most is not None and account is not None else {}
            for what, more in over.items():
                if more > state.excused.get((whose, what), 0):
                    yield f"{whose} has {more} of {what} more than its quota and what it may borrow"


_TABLES = tuple(TABLES)
_INDEXES = (
    "tally",
    "on_node",
    "children",
    "rooted",
    "named",
    "held",
    "limits",
    "runs",
    "ending",
    "groups",
    "group_names",
    "musters",
    "finished",
    "valued",
    "by_key",
    "hosted",
    "sessions_of",
    "lost",
    "closing",
    "over",
    "unwell",
    "blamed",
    "quarantined",
    "inside",
    "units_on",
    "reserved_by",
    "lending",
    "unsettled",
    "reserved_over",
)


def _plain(index: Any) -> Any:
    """Without order, as far as order is no part of its meaning, and without what is empty or over."""
    if isinstance(index, list):
        return index
    return {
        key: evolve(value, begun=None) if isinstance(value, Muster) else value
        for key, value in index.items()
        if not isinstance(value, Tally) or value.living
    }


# Sessions and names ---------------------------------------------------------------------------------------------------


def _sessions(state: State) -> Iterator[str]:
    """An ended session owns nothing that lives."""
    for session in state.sessions.values():
        if session.phase is SessionPhase.ENDED and session.attempt_id is None and state.owned(session.session):
            yield f"session {session.session} has ended and owns {state.owned(session.session)}"
        if session.phase is SessionPhase.CLOSING and session.session not in state.closing:
            yield f"session {session.session} is closing and nobody waits for it"


def _names(state: State) -> Iterator[str]:
    """Names are bound to living incarnations, and an exclusive one to a single actor."""
    for binding in state.bindings.values():
        endpoint = binding.endpoint
        session = state.sessions.get(endpoint.incarnation)
        if not state.attempt_living(endpoint.incarnation) and (session is None or session.over):
            yield f"name {endpoint.name} is bound to the dead {endpoint.incarnation}"
    for key, actors in state.by_key.items():
        if len(actors) > 1 and any(state.bindings[actor].exclusive for actor in actors):
            yield f"{key} is exclusive and bound to {list(actors)}"


def _bounds(state: State) -> Iterator[str]:
    most = state.rules.finished_limit
    idle = [job_id for job_id in state.finished if not state.tally[job_id].living]
    for what, count in (("jobs", len(idle)), ("sessions", len(state.over)), ("actors", len(state.graves))):
        if count > most:
            yield f"{count} ended {what} on record, the limit is {most}"
    if state.valued_bytes != sum(state.valued.values()):
        yield f"results have {sum(state.valued.values())} bytes, and are counted as {state.valued_bytes}"
    if state.valued_bytes > state.rules.results_limit_bytes:
        yield f"results of {state.valued_bytes} bytes are kept, the limit is {state.rules.results_limit_bytes}"
    if len(state.past) > state.rules.history_limit:
        yield f"{len(state.past)} lines of old jobs, the limit is {state.rules.history_limit}"
    yield from (f"{job_id} is on record and in the past" for job_id in state.past if job_id in state.jobs)


RULES: tuple[Rule, ...] = (
    _capacity,
    _ports,
    _nodes,
    _cordons,
    _fleet,
    _quarantine,
    _attempts,
    _wishes,
    _jobs,
    _limits,
    _preemption,
    _alone_with_its_name,
    _groups,
    job_groups_are_sound,
    _indexes,
    _sessions,
    _names,
    _bounds,
    _quotas,
    slices_are_whole,
    *RESERVATION_RULES,
)

RULES_OF_THE_LIVING = tuple(_living_jobs if rule is _jobs else rule for rule in RULES if rule is not _indexes)
