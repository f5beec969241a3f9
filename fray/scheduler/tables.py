"""The law's tables and the indexes over them: each row is changed in one place, and marked to be saved.

Rows are stored; indexes are not, they are built again by `Tables.load`. Dicts stand where sets would do, so that every
walk has the same order in every run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from attrs import define

from fray.model.bands import Band
from fray.model.ids import ActorId, AttemptId, BlobId, JobId, Namespace, NodeName, SessionId, attempt_id
from fray.model.reservations import ReservationId
from fray.model.resources import Demand
from fray.model.specs import JobSpec, Outcome
from fray.scheduler.asks import Ask, Part, ask_of, part_of, within
from fray.scheduler.charged import ChargedTables, weight
from fray.scheduler.fairness import Tenant
from fray.scheduler.fleet import Books
from fray.scheduler.match import Pool
from fray.scheduler.musters import Muster, stage_of
from fray.scheduler.plans import Plan
from fray.scheduler.queue import Applicant, Kind, Queue, Shape
from fray.scheduler.reserved import ReservedTables
from fray.scheduler.reserved import discard as _discard
from fray.scheduler.reserved_rows import Reservation
from fray.scheduler.rows import (
    Attempt,
    Binding,
    Blame,
    Claim,
    Grave,
    Job,
    JobGroup,
    JobPhase,
    Law,
    Node,
    NodePhase,
    Past,
    Rules,
    Session,
    SessionPhase,
    TakenPort,
)
from fray.scheduler.service import takes_work as takes_work
from fray.scheduler.timers import Timers


@define
class Tally:
    """Members of a job's generation."""

    living: int = 0
    ran: int = 0


Sought: TypeAlias = tuple[Shape, Band, Tenant | None]


def name_key(namespace: Namespace, name: str) -> str:
    return f"name:{namespace}/{name}"


def actor_key(actor_id: ActorId) -> str:
    return f"actor:{actor_id}"


def binding_key(binding: Binding) -> str:
    return name_key(binding.endpoint.namespace, binding.endpoint.name)


class Tables(ReservedTables):
    """Rows and indexes, without decisions."""

    def __init__(self, now: float = 0.0, rules: Rules | None = None) -> None:
        ChargedTables.__init__(self)
        self.rules = rules or Rules()
        self.law = Law(now=now)
        self.jobs: dict[JobId, Job] = {}
        self.attempts: dict[AttemptId, Attempt] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.bindings: dict[ActorId, Binding] = {}
        self.graves: dict[ActorId, Grave] = {}
        self.past: dict[JobId, Past] = {}
        """Jobs of which only a line is kept, oldest end first."""
        self.reservations: dict[ReservationId, Reservation] = {}
        self.job_groups: dict[str, JobGroup] = {}
        self.claims: dict[str, Claim] = {}
        """By applicant."""
        self._dirty: dict[tuple[str, str], None] = {}
        self.fleet = Books(self.touch)
        """Machines asked of providers."""
        self._make_indexes()

    def _make_indexes(self) -> None:
        self.pool = Pool()
        self._make_charged_indexes()
        self.queue = Queue(self.shares)
        self.possible: dict[Part, int] = {}
        """What machines that are here, declared or to be had could hold, and at which `Pool.machines_version`."""
        self.tally: dict[JobId, Tally] = {}
        self.on_node: dict[NodeName, dict[AttemptId, None]] = {}
        """Living attempts."""
        self.children: dict[str, dict[JobId, None]] = {}
        """Living jobs by owner."""
        self.rooted: dict[SessionId, dict[JobId, None]] = {}
        """Living jobs by the session at the top."""
        self.named: dict[tuple[Namespace, str], dict[JobId, None]] = {}
        """Living jobs by name."""
        self.held: dict[JobId, None] = {}
        """Jobs that wait for others, and for no time."""
        self.alarms: list[tuple[float, int, JobId]] = []
        """Jobs in their back-off: (its end, order of acceptance, job), soonest first."""
        self.limits: list[tuple[float, int, JobId]] = []
        """Jobs that run and have a time limit: (when it is over, order of acceptance, job), soonest first."""
        self.runs: dict[Band, list[tuple[float, int, JobId]]] = {band: [] for band in Band}
        """Jobs that run, by band: (when placed, order of acceptance, job)."""
        self.ending: dict[JobId, None] = {}
        """Jobs whose end, or that of their generation, is decided, and which still have machines."""
        self.groups: dict[str, dict[JobId, None]] = {}
        """Living members of supervised groups, in their order."""
        self.musters: dict[str, Muster] = {}
        """Members of job groups."""
        self.group_names: dict[tuple[Namespace, str], dict[str, None]] = {}
        """Ids of job groups that are not over, by name."""
        self.finished: dict[JobId, None] = {}
        """Ended jobs, oldest end first."""
        self.valued: dict[JobId, int] = {}
        """Ended jobs that have a value, and its size; oldest end first."""
        self.valued_bytes = 0
        self.by_key: dict[str, dict[ActorId, None]] = {}
        self.hosted: dict[str, dict[ActorId, None]] = {}
        """Bindings by incarnation."""
        self.sessions_of: dict[AttemptId, dict[SessionId, None]] = {}
        self.lost: dict[SessionId, None] = {}
        """Drivers in their grace."""
        self.closing: dict[SessionId, None] = {}
        self.over: dict[SessionId, None] = {}
        """Ended sessions, oldest end first."""
        self.unwell: dict[NodeName, None] = {}
        """Nodes that are not alive."""
        self.plans: dict[str, Plan] = {}
        """By applicant, while it is the first that waits, or starves. No index: made anew after a restart."""
        self.sought: dict[Sought, tuple[float, float]] = {}
        """Who found nobody whose place it may take: when it looks again, and after what pause. No index."""
        self.timers = Timers()
        """By node, ``drain``: when its drain waits no longer; ``probe``: when it is asked how it is. By job, ``wait``:
        when it has waited for machines as long as it may."""
        self.blamed: dict[str, dict[NodeName, None]] = {}
        """On which machines jobs that are alike have ended badly; see `quarantine`."""
        self.quarantined: dict[NodeName, None] = {}
        self.emptied: dict[NodeName, None] = {}
        """Nodes whose last attempt has ended since the last look; whoever looks clears it (`drain.settle`)."""
        self.blobs: dict[BlobId, int] = {}
        """How many rows refer to a payload or value."""
        self._make_reserved_indexes()

    # Time and order

    @property
    def now(self) -> float:
        """The law's time, seconds since the epoch; never decreases."""
        return self.law.now

    def next_order(self) -> int:
        self.law.order += 1
        return self.law.order

    # Saving

    def touch(self, table: str, key: str) -> None:
        """The row has changed, or is gone."""
        self._dirty[(table, key)] = None

    def rows(self, table: str) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = {
            "job": self.jobs,
            "job_group": self.job_groups,
            "attempt": self.attempts,
            "node": self.nodes,
            "session": self.sessions,
            "name": self.bindings,
            "grave": self.graves,
            "past": self.past,
            "usage": self.usage,
            "unit": self.fleet.units,
            "fleet_group": self.fleet.groups,
            "reservation": self.reservations,
            "claim": self.claims,
            "law": {"law": self.law},
        }
        return tables[table]

    def take_dirty(self) -> tuple[list[tuple[str, str, object]], list[tuple[str, str]]]:
        """Rows to write ``(table, key, row)`` and to delete ``(table, key)`` since the last call.

        Rows are the living objects: turn them into text before the next step.
        """
        upserts: list[tuple[str, str, object]] = []
        deletes: list[tuple[str, str]] = []
        if self._dirty:
            self.touch("law", "law")
        for table, key in self._dirty:
            row = self.rows(table).get(key)
            if row is None:
                deletes.append((table, key))
            else:
                upserts.append((table, key, row))
        self._dirty = {}
        return upserts, deletes

    def load(self, rows: Iterable[tuple[str, str, object]]) -> None:
        """Fill empty tables from the store, in any order, and build the indexes."""
        found = {(table, key): row for table, key, row in rows}
        law = found.pop(("law", "law"), None)
        if isinstance(law, Law):
            self.law = law
        for (table, key), row in found.items():
            self.rows(table)[key] = row
        self._sort_tables()
        self._index_all()
        self.shares.rank_all(self.now)

    def _sort_tables(self) -> None:
        self.jobs = dict(sorted(self.jobs.items(), key=lambda item: item[1].order))
        self.job_groups = dict(sorted(self.job_groups.items(), key=lambda item: item[1].order))
        self.attempts = dict(sorted(self.attempts.items(), key=lambda item: self._attempt_order(item[1])))
        self.nodes = dict(sorted(self.nodes.items()))
        self.sessions = dict(sorted(self.sessions.items()))
        self.bindings = dict(sorted(self.bindings.items(), key=lambda item: item[1].order))
        self.graves = dict(sorted(self.graves.items(), key=lambda item: item[1].order))
        self.past = dict(sorted(self.past.items(), key=lambda item: (item[1].ended_at, item[1].order)))
        self.usage = dict(sorted(self.usage.items()))
        self.reservations = dict(sorted(self.reservations.items(), key=lambda item: item[1].order))
        self.claims = dict(sorted(self.claims.items(), key=lambda item: (item[1].made_at, item[0])))

    def _attempt_order(self, attempt: Attempt) -> tuple[int, int, int]:
        job = self.jobs.get(attempt.job_id)
        return (job.order if job else 0), attempt.generation, attempt.member

    def _index_all(self) -> None:
        for used in self.usage.values():
            self.shares.open(used)
        self.fleet.load()
        for node in self.nodes.values():
            self.index_node(node)
            self.shares.weigh(node.name, weight(node))
        for session in sorted(self.sessions.values(), key=lambda s: (s.ended_at, s.session)):
            self.index_session(session)
        for group in self.job_groups.values():
            self._index_group(group)
        for job in sorted(self.jobs.values(), key=lambda j: (j.ended_at or 0.0, j.order)):
            self._index_job(job)
        for group_id in self.job_groups:
            self.assemble(group_id)
        for row in sorted(self.reservations.values(), key=lambda row: (row.ended_at or 0.0, row.order)):
            self._index_reservation(row)
        for attempt in self.attempts.values():
            self._index_attempt(attempt)
        self._index_ports()
        for binding in self.bindings.values():
            self._index_binding(binding)
        self.blobs = self.count_blobs()

    # Nodes

    def put_node(self, node: Node) -> None:
        """A new one, or another incarnation."""
        if node.name in self.nodes:
            self.set_blames(self.nodes[node.name], ())
        self.nodes[node.name] = node
        node.leaving = self.fleet.leaving(node)
        self.index_node(node)
        self._weigh(node.name, weight(node))
        self.touch("node", node.name)

    def index_node(self, node: Node) -> None:
        self.pool.add(node.name, node.capacity, takes_work(node))
        self.pool.machines[node.name].ports.avoided = {taken.port: taken.until for taken in node.taken}
        self.pool.withhold(node.name, node.busy)
        self.on_node.setdefault(node.name, {})
        self.fleet.node_put(node)
        self._time_node(node)
        self._index_blames(node)

    def _time_node(self, node: Node) -> None:
        if node.phase is NodePhase.ALIVE:
            self.unwell.pop(node.name, None)
        else:
            self.unwell[node.name] = None
        self.timers.set(("drain", node.name), node.cordon.until if node.cordon is not None else None)
        self._index_quarantine(node)

    def _index_quarantine(self, node: Node) -> None:
        found, at = node.quarantine, None
        if found is None:
            self.quarantined.pop(node.name, None)
        else:
            self.quarantined[node.name] = None
            at = found.probe_at if found.asked_at is None else found.asked_at + self.rules.probe_limit_s
        self.timers.set(("probe", node.name), at)

    def set_blames(self, node: Node, blames: tuple[Blame, ...]) -> None:
        """What speaks against it."""
        for blame in node.blames:
            _discard(self.blamed, blame.kind, node.name)
        node.blames = blames
        self._index_blames(node)
        self.touch("node", node.name)

    def _index_blames(self, node: Node) -> None:
        for blame in node.blames:
            self.blamed.setdefault(blame.kind, {})[node.name] = None

    def node_changed(self, node: Node) -> None:
        """Its phase, strays, settledness, busy devices or cordon may have changed."""
        self._time_node(node)
        self._weigh(node.name, weight(node))
        self.pool.set_open(node.name, takes_work(node))
        self.pool.withhold(node.name, node.busy)
        self.reserved_on(node.name)
        self.touch("node", node.name)

    def drop_node(self, node: Node) -> None:
        node.quarantine = node.cordon = None
        self.set_blames(node, ())
        self._time_node(node)
        del self.nodes[node.name], self.on_node[node.name]
        self.fleet.node_dropped(node)
        self.unwell.pop(node.name, None)
        self.pool.remove(node.name)
        self._weigh(node.name, None)
        self.touch("node", node.name)

    # Sessions

    def put_session(self, session: Session) -> None:
        self.sessions[session.session] = session
        self.session_changed(session)

    def session_changed(self, session: Session) -> None:
        for index in (self.lost, self.closing, self.over):
            index.pop(session.session, None)
        self.index_session(session)
        self.touch("session", session.session)

    def index_session(self, session: Session) -> None:
        if session.attempt_id:
            self.sessions_of.setdefault(session.attempt_id, {})[session.session] = None
        index = {
            SessionPhase.LOST: None if session.attempt_id else self.lost,
            SessionPhase.CLOSING: self.closing,
            SessionPhase.ENDED: self.over,
        }.get(session.phase)
        if index is not None:
            index[session.session] = None

    def drop_session(self, session: Session) -> None:
        del self.sessions[session.session]
        for index in (self.lost, self.closing, self.over):
            index.pop(session.session, None)
        if session.attempt_id:
            _discard(self.sessions_of, session.attempt_id, session.session)
        self.touch("session", session.session)

    # Jobs

    def add_job(self, job: Job) -> None:
        self.jobs[job.job_id] = job
        self._index_job(job)
        self.retain(job.spec.payload)
        self.touch("job", job.job_id)

    def _index_job(self, job: Job) -> None:
        self.tally[job.job_id] = Tally()
        if job.spec.job_group:
            self.musters[job.spec.job_group].jobs[job.job_id] = None
            self.mustered(job, None)
        if job.ended:
            self._index_ended(job)
            return
        self.named.setdefault((job.spec.namespace, job.spec.name), {})[job.job_id] = None
        if job.owner:
            self.children.setdefault(job.owner, {})[job.job_id] = None
        if job.root:
            self.rooted.setdefault(job.root, {})[job.job_id] = None
        if job.spec.reservation_id:
            self.inside.setdefault(job.spec.reservation_id, {})[job.job_id] = None
        if job.spec.siblings is not None:
            self.groups.setdefault(job.spec.siblings.group_id, {})[job.job_id] = None
        if job.phase is JobPhase.QUEUED:
            self.enqueue(job)
        elif job.phase is JobPhase.HELD:
            self.hold(job)
        elif job.phase is JobPhase.CLOSING:
            self.ending[job.job_id] = None
        else:
            self._index_run(job)

    def _index_run(self, job: Job) -> None:
        insort(self.runs[job.band], (job.placed_at or 0.0, job.order, job.job_id))
        if job.over_at is not None:
            insort(self.limits, (job.over_at, job.order, job.job_id))

    def _drop_run(self, job: Job) -> None:
        _drop(self.runs[job.band], (job.placed_at or 0.0, job.order, job.job_id))
        if job.over_at is not None:
            _drop(self.limits, (job.over_at, job.order, job.job_id))

    def turned(self, job: Job, before: JobPhase) -> None:
        """Its phase has changed: index it by whether it has machines."""
        if before is JobPhase.QUEUED:
            self.timers.set(("wait", job.job_id), None)
        was_run = before in (JobPhase.STARTING, JobPhase.RUNNING)
        if job.runs and not was_run:
            self._index_run(job)
        elif was_run and not job.runs:
            self._drop_run(job)
        if job.phase is JobPhase.CLOSING:
            self.ending[job.job_id] = None
        elif before is JobPhase.CLOSING:
            del self.ending[job.job_id]

    def bury_job(self, job: Job) -> None:
        """It has ended: it is nobody's living job any more."""
        _discard(self.named, (job.spec.namespace, job.spec.name), job.job_id)
        _discard(self.children, job.owner, job.job_id)
        _discard(self.rooted, job.root, job.job_id)
        _discard(self.inside, job.spec.reservation_id, job.job_id)
        if job.spec.siblings is not None:
            _discard(self.groups, job.spec.siblings.group_id, job.job_id)
        self._index_ended(job)
        self.touch("job", job.job_id)

    def _index_ended(self, job: Job) -> None:
        self.finished[job.job_id] = None
        if job.outcome is not None and job.outcome.value is not None:
            self.valued[job.job_id] = job.outcome.value_bytes
            self.valued_bytes += job.outcome.value_bytes

    def unvalue(self, job: Job) -> None:
        """Its value is no longer kept."""
        self.valued_bytes -= self.valued.pop(job.job_id, 0)

    def drop_job(self, job: Job) -> None:
        for attempt in list(self.records(job)):
            self.drop_attempt(attempt)
        self.unvalue(job)
        del self.jobs[job.job_id], self.tally[job.job_id], self.finished[job.job_id]
        self.touch("job", job.job_id)
        if job.spec.job_group:
            self._forget_member(job)

    def applicant(self, job: Job) -> Applicant:
        """The job as something that waits for machines."""
        spec = job.spec
        return Applicant(
            job.job_id,
            self._shape(job),
            job.order,
            job.queued_at,
            band=job.band,
            tenant=self.shares.tenant(spec.user, spec.namespace),
            time_limit_s=spec.time_limit_s,
        )

    def _shape(self, job: Job) -> Shape:
        if job.spec.job_group:
            return Shape(self.ask(job), _is_child(job), job.spec.reservation_id)
        return self.queue.shape_of(job.spec, _is_child(job))

    def job_of(self, applicant: Applicant) -> Job | None:
        """The job that waits, or the first of a group; None of what is no job."""
        if applicant.kind is Kind.GROUP and applicant.id in self.musters:
            return self.jobs[next(iter(self.musters[applicant.id].gathered))]
        return self.jobs.get(applicant.id)

    def ask(self, job: Job) -> Ask:
        """A member of a job group goes where the others are."""
        group = self.job_groups[job.spec.job_group] if job.spec.job_group else None
        if group is None or group.place is None or not group.config.same:
            return ask_of(job.spec)
        return within(ask_of(job.spec), group.config.same, group.place)

    def enqueue(self, job: Job) -> None:
        self.queue.add(self.applicant(job))
        self._limit_wait(job, job.queued_at)

    def _limit_wait(self, job: Job, since: float) -> None:
        limit_s = job.spec.wait_limit_s
        self.timers.set(("wait", job.job_id), None if limit_s is None else since + limit_s)

    def places_of(self, applicant: Applicant) -> tuple[tuple[NodeName, ...], ...]:
        """Where its members would like to be, part by part; empty: anywhere."""
        if applicant.kind is Kind.GROUP:
            return tuple(job.places for job in self.gathered(applicant.id))
        job = self.jobs.get(applicant.id)
        return (job.places,) if job is not None and job.places else ()

    def demand(self, job: Job) -> Demand:
        """What each of its members takes of a machine, or will: of any-of devices those it was given last."""
        return (job.spec.demand, *job.spec.alternatives)[job.choice]

    def hold(self, job: Job) -> None:
        """It is HELD: index it by what it waits for first."""
        if job.gathered:
            self.musters[job.spec.job_group].gathered[job.job_id] = None
        elif job.held_until is None:
            self.held[job.job_id] = None
        else:
            insort(self.alarms, (job.held_until, job.order, job.job_id))

    def unhold(self, job: Job) -> None:
        """It is HELD no more, or waits for something else now."""
        if job.gathered:
            self._ungather(job)
        elif self.held.pop(job.job_id, self) is self and job.held_until is not None:
            self.alarms.remove((job.held_until, job.order, job.job_id))

    # Job groups

    def add_group(self, group: JobGroup) -> None:
        self.job_groups[group.group_id] = group
        self._index_group(group)
        self.touch("job_group", group.group_id)

    def _index_group(self, group: JobGroup) -> None:
        self.musters[group.group_id] = Muster()
        if group.ended_at is None:
            self.group_names.setdefault((group.namespace, group.config.name), {})[group.group_id] = None

    def bury_group(self, group: JobGroup) -> None:
        """Its last job has ended."""
        _discard(self.group_names, (group.namespace, group.config.name), group.group_id)
        self.touch("job_group", group.group_id)

    def _forget_member(self, job: Job) -> None:
        """A group is on record as long as one of its jobs."""
        muster = self.musters[job.spec.job_group]
        muster.jobs.pop(job.job_id)
        if not muster.jobs:
            del self.job_groups[job.spec.job_group], self.musters[job.spec.job_group]
            self.touch("job_group", job.spec.job_group)

    def mustered(self, job: Job, before: JobPhase | None) -> None:
        """A member's phase has changed."""
        self.musters[job.spec.job_group].moved(job.job_id, stage_of(job.spec), before, job.phase)

    def gather(self, job: Job) -> None:
        """It waits for nothing any more but to be placed with its group."""
        job.gathered = True
        self.musters[job.spec.job_group].gathered[job.job_id] = None
        self.touch("job", job.job_id)

    def _ungather(self, job: Job) -> None:
        job.gathered = False
        if job.spec.job_group in self.queue:
            self.queue.remove(job.spec.job_group)
            for mate in self.musters[job.spec.job_group].gathered:
                self.timers.set(("wait", mate), None)
        self.musters[job.spec.job_group].gathered.pop(job.job_id, None)

    def gathered(self, group_id: str) -> list[Job]:
        """Members that are placed together next, in order of acceptance."""
        return sorted(map(self.jobs.__getitem__, self.musters[group_id].gathered), key=lambda job: job.order)

    def assemble(self, group_id: str) -> None:
        """Into the queue with a group all of whose living members have gathered."""
        if self.musters[group_id].complete and group_id not in self.queue:
            self.queue.add(self._applying(self.job_groups[group_id]))
            for job in self.gathered(group_id):
                self._limit_wait(job, self.job_groups[group_id].queued_at)

    def _applying(self, group: JobGroup) -> Applicant:
        """The group as something that waits for machines."""
        jobs = self.gathered(group.group_id)
        spec = jobs[0].spec
        ask = Ask(tuple(part_of(job.spec) for job in jobs), group.config.same)
        return Applicant(
            group.group_id,
            Shape(ask, _is_child(jobs[0]), spec.reservation_id),
            group.order,
            group.queued_at,
            Kind.GROUP,
            jobs[0].band,
            self.shares.tenant(spec.user, spec.namespace),
            _limit_s([job.spec for job in jobs]),
        )

    def group_of(self, job: Job) -> list[Job]:
        """Its supervised group, living members in order, itself included; itself alone without one."""
        if job.spec.siblings is None:
            return [job]
        mates = [self.jobs[job_id] for job_id in self.groups.get(job.spec.siblings.group_id, ())]
        return mates if job in mates else [*mates, job]

    def living_jobs(self) -> int:
        return len(self.jobs) - len(self.finished)

    # Attempts

    def records(self, job: Job) -> Iterator[Attempt]:
        """All attempts on record, oldest first."""
        for generation in range(job.oldest, job.generation + 1):
            for member in range(job.spec.members):
                attempt = self.attempts.get(attempt_id(job.job_id, generation, member))
                if attempt is not None:
                    yield attempt

    def members(self, job: Job) -> list[Attempt]:
        """Attempts of the generation that is there, empty while the job is queued."""
        ids = (attempt_id(job.job_id, job.generation, member) for member in range(job.spec.members))
        return [self.attempts[id_] for id_ in ids if id_ in self.attempts]

    def living_members(self, job: Job) -> list[Attempt]:
        return [attempt for attempt in self.members(job) if attempt.living]

    def add_attempt(self, attempt: Attempt) -> None:
        """Its share of the machine is taken already (`Pool.place`)."""
        self.attempts[attempt.attempt_id] = attempt
        self.tally[attempt.job_id].living += 1
        self.on_node[attempt.node][attempt.attempt_id] = None
        self.fleet.used(attempt.node, self.now)
        self._charge(attempt, 1)
        self.touch("attempt", attempt.attempt_id)

    def _charge(self, attempt: Attempt, times: int) -> None:
        job = self.jobs[attempt.job_id]
        if not job.spec.reservation_id:  # that is charged as a whole
            self.charge(*self.charged(job, attempt), times)

    def charged(self, job: Job, attempt: Attempt) -> tuple[Tenant, Demand, str]:
        tenant = self.shares.tenant(job.spec.user, job.spec.namespace)
        return tenant, self.demand(job), self.variant_of(attempt.node, attempt.devices)

    def _index_attempt(self, attempt: Attempt) -> None:
        job = self.jobs[attempt.job_id]
        tally = self.tally[attempt.job_id]
        tally.ran += attempt.ran and attempt.generation == job.generation
        if attempt.living:
            tally.living += 1
            self.expect_inside(job.spec.reservation_id, attempt.node)
            self.on_node[attempt.node][attempt.attempt_id] = None
            pool = self.pool_for(job.spec.reservation_id)
            pool.take(attempt.node, self.demand(job), attempt.devices, attempt.ports.values())
            if not job.spec.reservation_id:
                self.shares.count(*self.charged(job, attempt), 1, self.now)

    def vacate(self, attempt: Attempt) -> None:
        """It has ended: its share of the machine is free."""
        job = self.jobs[attempt.job_id]
        self.tally[attempt.job_id].living -= 1
        del self.on_node[attempt.node][attempt.attempt_id]
        if not self.on_node[attempt.node]:
            self.emptied[attempt.node] = None
        self.fleet.used(attempt.node, self.now)
        pool = self.pool_for(job.spec.reservation_id)
        pool.release(attempt.node, self.demand(job), attempt.devices, attempt.ports.values())
        pool.loosened += 1
        self._charge(attempt, -1)
        if job.spec.reservation_id:
            self.vacated_inside(job.spec.reservation_id, attempt.node)
        if attempt.ports:
            self.ports_released(attempt.node)
        self.touch("attempt", attempt.attempt_id)

    def _index_ports(self) -> None:
        """Go on after the numbers that were given last."""
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.placed_at):
            if attempt.node in self.pool.machines:
                self.pool.machines[attempt.node].ports.used_all(attempt.ports.values())

    def avoid_ports(self, attempt: Attempt, until: float) -> None:
        """A stranger holds one of its ports: others are given before them until then."""
        node = self.nodes[attempt.node]
        kept = {taken.port: taken.until for taken in node.taken if taken.until > self.now}
        kept |= dict.fromkeys(attempt.ports.values(), until)
        node.taken = tuple(TakenPort(port, at) for port, at in kept.items())
        self.pool.machines[node.name].ports.avoided = kept
        self.touch("node", node.name)

    def drop_attempt(self, attempt: Attempt) -> None:
        del self.attempts[attempt.attempt_id]
        self.touch("attempt", attempt.attempt_id)

    # Names

    def put_binding(self, binding: Binding) -> None:
        self.bindings[binding.endpoint.actor_id] = binding
        self._index_binding(binding)
        self.touch("name", binding.endpoint.actor_id)

    def _index_binding(self, binding: Binding) -> None:
        actor_id = binding.endpoint.actor_id
        self.by_key.setdefault(binding_key(binding), {})[actor_id] = None
        self.hosted.setdefault(binding.endpoint.incarnation, {})[actor_id] = None

    def drop_binding(self, binding: Binding) -> None:
        actor_id = binding.endpoint.actor_id
        del self.bindings[actor_id]
        _discard(self.by_key, binding_key(binding), actor_id)
        _discard(self.hosted, binding.endpoint.incarnation, actor_id)
        self.touch("name", actor_id)

    def put_grave(self, grave: Grave) -> None:
        self.graves.pop(grave.actor_id, None)
        self.graves[grave.actor_id] = grave
        self.touch("grave", grave.actor_id)

    def drop_grave(self, actor_id: ActorId) -> None:
        if self.graves.pop(actor_id, None) is not None:
            self.touch("grave", actor_id)

    def put_past(self, past: Past) -> None:
        self.past[past.job_id] = past
        self.touch("past", past.job_id)

    def drop_past(self, job_id: JobId) -> None:
        del self.past[job_id]
        self.touch("past", job_id)

    # Claims

    def put_claim(self, claim: Claim) -> None:
        self.claims[claim.applicant] = claim
        self.touch("claim", claim.applicant)

    def drop_claim(self, applicant_id: str) -> None:
        """What was kept may fit others now."""
        claim = self.claims.pop(applicant_id)
        if not claim.reservation or claim.reservation in self.reserved:
            self.pool_for(claim.reservation).loosen(share.node for share in claim.shares)
        if applicant_id in self.queue:
            self.queue.retry(applicant_id)
        self.touch("claim", applicant_id)

    # Payloads and values

    def refers(self, blob: BlobId) -> bool:
        """Some row still needs this payload or value."""
        return blob in self.blobs

    def retain(self, blob: BlobId | None) -> None:
        if blob is not None:
            self.blobs[blob] = self.blobs.get(blob, 0) + 1

    def release(self, blob: BlobId | None) -> None:
        if blob is not None:
            self.blobs[blob] -= 1
            if not self.blobs[blob]:
                del self.blobs[blob]

    def needs_payload(self, job: Job) -> bool:
        return not job.ended or self.tally[job.job_id].living > 0

    def count_blobs(self) -> dict[BlobId, int]:
        """References counted from the rows: what ``blobs`` must be."""
        found: dict[BlobId, int] = {}
        payloads = [job.spec.payload for job in self.jobs.values() if self.needs_payload(job)]
        states = [job.checkpoint.blob for job in self.jobs.values() if job.checkpoint is not None]
        rows: list[Job | Attempt] = [*self.jobs.values(), *self.attempts.values()]
        for blob in [*payloads, *states, *(_value(row.outcome) for row in rows)]:
            if blob is not None:
                found[blob] = found.get(blob, 0) + 1
        return found


def _limit_s(specs: list[JobSpec]) -> float | None:
    """After how long, and the ladder of the first, all of them are known to be over; None: nobody knows."""
    ends = [spec.time_limit_s + _rungs_s(spec) for spec in specs if spec.time_limit_s is not None]
    return max(ends) - _rungs_s(specs[0]) if len(ends) == len(specs) else None


def _rungs_s(spec: JobSpec) -> float:
    return spec.ladder.cancel_s + spec.ladder.term_s


def _is_child(job: Job) -> bool:
    """Launched by a running job, and part of it."""
    return bool(job.owner) and job.owner != job.root


def _value(outcome: Outcome | None) -> BlobId | None:
    return outcome.value if outcome else None


def _drop(line: list[tuple[float, int, JobId]], entry: tuple[float, int, JobId]) -> None:
    del line[bisect_left(line, entry)]
