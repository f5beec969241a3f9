"""Indexes over jobs, attempts, job groups, sessions and names; and the state built again from stored rows.

Each row is changed in one place, indexed and marked to be saved there. Rows are stored, indexes are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from fray.model.ids import ActorId, AttemptId, BlobId, JobId, Namespace, NodeName, SessionId, attempt_id
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import JobSpec, Outcome
from fray.scheduler.lifecycle import JobPhase, SessionPhase
from fray.scheduler.pool.requests import MemberGroup, PlacedShare, PlacementRequest, confine_to, part_of, request_of
from fray.scheduler.queue.applicant import Applicant, ApplicantKind, PlacementShape, StartPlan
from fray.scheduler.queue.fair_share import Tenant
from fray.scheduler.state.indexes import (
    BlobReferenceCounts,
    GenerationCount,
    GroupMembers,
    LivingJobs,
    OneToMany,
    OrderedSet,
    ResultSizes,
    TimedJob,
    TimedJobs,
    stage_of,
)
from fray.scheduler.state.machine_tables import MachineTables, counted_capacity
from fray.scheduler.state.owners import is_child
from fray.scheduler.state.rows import (
    ActorRegistration,
    ActorTombstone,
    AttemptRow,
    JobGroupRow,
    JobRow,
    JobTombstone,
    SchedulerConfig,
    SchedulerMeta,
    Session,
    TakenPort,
)

SearchKey: TypeAlias = tuple[PlacementShape, Band, Tenant | None]


class Tables(MachineTables):
    """Rows and indexes, without decisions."""

    def __init__(self, now: float = 0.0, config: SchedulerConfig | None = None) -> None:
        super().__init__(now, config)
        self.children: OneToMany[str, JobId] = OneToMany()
        """Living jobs by owner."""
        self.jobs_by_root: OneToMany[SessionId, JobId] = OneToMany()
        """Living jobs by the driver's session at the top of the chain of owners."""
        self.jobs_by_name: OneToMany[tuple[Namespace, str], JobId] = OneToMany()
        """Living jobs by name."""
        self.living_jobs = LivingJobs()
        self.sibling_groups: OneToMany[str, JobId] = OneToMany()
        """Living members of supervised groups, in order of acceptance."""
        self.held_jobs: OrderedSet[JobId] = OrderedSet()
        """Held jobs that wait for other jobs, not for a time."""
        self.backoffs = TimedJobs()
        """Jobs in their back-off, by its end."""
        self.time_limits = TimedJobs()
        """Running jobs with a time limit, by its end."""
        self.running_by_band: dict[Band, TimedJobs] = {band: TimedJobs() for band in Band}
        """Running jobs of each band, by the time of placement."""
        self.ending_jobs: OrderedSet[JobId] = OrderedSet()
        """Jobs that still have machines although the end of the job or of its generation is decided."""
        self.finished_jobs: OrderedSet[JobId] = OrderedSet()
        """Ended jobs, oldest end first."""
        self.value_sizes = ResultSizes()
        self.blob_refs = BlobReferenceCounts()
        self.generation_counts: dict[JobId, GenerationCount] = {}

        self.group_names: OneToMany[tuple[Namespace, str], str] = OneToMany()
        """Ids of job groups that have not ended, by name."""
        self.group_members: dict[str, GroupMembers] = {}

        self.sessions_of: OneToMany[AttemptId, SessionId] = OneToMany()
        self.lost_drivers: OrderedSet[SessionId] = OrderedSet()
        """Lost drivers whose grace period has not ended."""
        self.closing_sessions: OrderedSet[SessionId] = OrderedSet()
        self.ended_sessions: OrderedSet[SessionId] = OrderedSet()
        """Ended sessions, oldest end first."""

        self.registrations_by_key: OneToMany[str, ActorId] = OneToMany()
        self.registrations_by_incarnation: OneToMany[str, ActorId] = OneToMany()

        # Caches and decisions of the last passes: they are not rebuilt from rows, but made again when they are needed.
        self._known_shares: dict[JobId, list[PlacedShare]] = {}  # of jobs with machines, see `machine_shares`
        self.feasible_at: dict[MemberGroup, int] = {}
        """`Pool.machines_version` at which a request was found to fit joined, declared or obtainable machines."""
        self.start_plans: dict[str, StartPlan] = {}
        """Plans by applicant: of the first waiting applicant, and of starving ones."""
        self.lending_inputs: object = None
        """Inputs of the last search for jobs to place on lent CPUs (`lending`)."""
        self.search_backoffs: dict[SearchKey, tuple[float, float]] = {}
        """Applicants that found no victims: time of the next search, and the pause before it in seconds."""
        self.paused_searches: dict[SearchKey, Any] = {}
        """Searches that are to be continued (`SearchMemory`), the one that has waited longest first."""

    # Loading

    def load(self, rows: Iterable[tuple[str, str, object]]) -> None:
        """Fill empty tables from the store, in any order, and build the indexes."""
        # All rows before any index: rows refer to each other, and come in the order in which they were saved.
        found = {(table, key): row for table, key, row in rows}
        meta = found.pop(("meta", "meta"), None)
        if isinstance(meta, SchedulerMeta):
            self.meta = meta
        tables = self.tables()
        for (table, key), row in found.items():
            tables[table][key] = row
        # Walks over tables decide about order (who is placed first), so a restarted controller must walk as the old one
        # did.
        self._sort_tables()
        self._index_all()
        self.shares.rank_all(self.now)

    def _index_all(self) -> None:
        # Each block needs those above it: nodes make the pool's machines, groups and jobs the entries that attempts
        # count in, reservations the pools from which attempts inside take their share.
        for used in self.usage.values():
            self.shares.open_account(used)
        self.fleet.rebuild()
        for node in self.nodes.values():
            self._index_node(node)
            self.shares.set_node_capacity(node.name, counted_capacity(node))
        # By their ends: the oldest is forgotten first.
        for session in sorted(self.sessions.values(), key=lambda s: (s.ended_at, s.session)):
            self._index_session(session)
        for group in self.job_groups.values():
            self._index_group(group)
        # By their ends, so that `finished_jobs` forgets the oldest first; living ones, which have none, keep their
        # order.
        for job in sorted(self.jobs.values(), key=lambda j: (j.ended_at or 0.0, j.order)):
            self._index_job(job)
        # After all jobs: only then it is known whether a group's living members have all gathered.
        for group_id in self.job_groups:
            self.enqueue_group_if_complete(group_id)
        for row in sorted(self.reservations.values(), key=lambda row: (row.ended_at or 0.0, row.order)):
            self._index_reservation(row)
        for attempt in self.attempts.values():
            self._index_attempt(attempt)
        # After the attempts have taken theirs: released numbers are given again last, also over a restart.
        self._index_ports()
        for registration in self.registrations.values():
            self._index_registration(registration)
        # Counted and not stored: a count that disagreed with the rows would delete a payload that is needed.
        self.blob_refs = self.count_blob_refs()

    # Attempts

    def attempt_records(self, job: JobRow) -> list[AttemptRow]:
        """Return all attempts on record, oldest first."""
        attempts, job_id, members = self.attempts, job.job_id, range(job.spec.members)
        generations = range(job.oldest, job.generation + 1)
        ids = [attempt_id(job_id, generation, member) for generation in generations for member in members]
        return [attempts[id_] for id_ in ids if id_ in attempts]

    def members(self, job: JobRow) -> list[AttemptRow]:
        """Return the attempts of the current generation; empty while the job is queued."""
        job_id = job.job_id
        # By computed ids, so that no index of attempts by job is needed.
        ids = (attempt_id(job_id, job.generation, member) for member in range(job.spec.members))
        return [self.attempts[id_] for id_ in ids if id_ in self.attempts]

    def living_members(self, job: JobRow) -> list[AttemptRow]:
        if job.spec.members == 1:  # the usual case, asked of thousands of jobs in a search for victims
            only = self.attempts.get(attempt_id(job.job_id, job.generation, 0))
            return [only] if only is not None and only.living else []
        return [attempt for attempt in self.members(job) if attempt.living]

    def machine_shares(self, job: JobRow) -> list[PlacedShare]:
        """Return what each living member takes, and of which machine. Do not modify."""
        found = self._known_shares.get(job.spec.job_id)
        if found is None:
            found = [
                (each.node, (self.share_of(each), each.devices, tuple(each.ports.values()) if each.ports else ()))
                for each in self.living_members(job)
            ]
            # One plan and one search after another ask this of the hundreds of jobs that end, or may end, next.
            if job.phase is JobPhase.CLOSING or job.is_active:
                self._known_shares[job.spec.job_id] = found
        return found

    def add_attempt(self, attempt: AttemptRow) -> None:
        """Add an attempt that the pool has already placed."""
        self.attempts[attempt.attempt_id] = attempt
        self.generation_counts[attempt.job_id].living += 1
        self.on_node[attempt.node][attempt.attempt_id] = None
        if self.has_machine_groups:
            self.fleet.on_node_used(attempt.node, self.now)
        self._charge_attempt(attempt, 1)
        self._index_loans(attempt)
        self.touch("attempt", attempt.attempt_id)

    def _charge_attempt(self, attempt: AttemptRow, times: int) -> None:
        job = self.jobs[attempt.job_id]
        if not job.spec.reservation_id:  # a reservation is charged as a whole
            self.charge(*self.attempt_charge(job, attempt), times)

    def attempt_charge(self, job: JobRow, attempt: AttemptRow) -> tuple[Tenant, Demand, str]:
        """Return what `charge` takes."""
        tenant = self.shares.tenant(job.spec.user, job.spec.namespace)
        return tenant, self.share_of(attempt), self.variant_of(attempt.node, attempt.devices)

    def _index_attempt(self, attempt: AttemptRow) -> None:
        job = self.jobs[attempt.job_id]
        count = self.generation_counts[attempt.job_id]
        # Earlier generations may still have living attempts, on silent machines; they do not count as run.
        count.ran += attempt.ran and attempt.generation == job.generation
        if attempt.living:
            count.living += 1
            # A job that takes nothing can be on a node where its reservation has no unit any more.
            self._ensure_reserved_machine(job.spec.reservation_id, attempt.node)
            self.on_node[attempt.node][attempt.attempt_id] = None
            pool = self.pool_for(job.spec.reservation_id)
            pool.take(attempt.node, self.share_of(attempt), attempt.devices, attempt.ports.values())
            self._index_loans(attempt)
            if not job.spec.reservation_id:
                self.shares.count_members(*self.attempt_charge(job, attempt), 1, self.now)

    def release_attempt(self, attempt: AttemptRow) -> None:
        """Free the machine of an attempt that has ended."""
        job = self.jobs[attempt.job_id]
        self.generation_counts[attempt.job_id].living -= 1
        self._known_shares.pop(attempt.job_id, None)
        del self.on_node[attempt.node][attempt.attempt_id]
        node = self.nodes.get(attempt.node)
        # The node may be forgotten already; and only cordoned ones can finish a drain.
        if node is not None and node.cordon is not None and not self.on_node[attempt.node]:
            self.newly_empty.add(attempt.node)
        if self.has_machine_groups:
            self.fleet.on_node_used(attempt.node, self.now)
        # Inside a reservation only its own pool gets the share back: to the cluster the unit is still taken.
        pool = self.pool_for(job.spec.reservation_id)
        pool.release(attempt.node, self.share_of(attempt), attempt.devices, attempt.ports.values())
        pool.freed_count += 1
        self._charge_attempt(attempt, -1)
        if attempt.lends or attempt.loans or attempt.attempt_id in self.lent_to:
            self._end_loans(attempt)
        if job.spec.reservation_id:
            self._on_attempt_ended_inside(job.spec.reservation_id, attempt.node)
        # Ports are the machine's: applicants of every reservation there may wait for one.
        if attempt.ports:
            self._on_ports_released(attempt.node)
        self.touch("attempt", attempt.attempt_id)

    def owner_attempts(self, owner: str) -> Iterator[AttemptRow]:
        """Yield the attempts in a chain of owners, the nearest first, also those that have ended."""
        while (attempt := self.attempts.get(owner)) is not None:
            yield attempt
            owner = self.jobs[attempt.job_id].owner

    def set_lending(self, attempt: AttemptRow, lends: bool) -> None:
        """Set whether a living attempt lends its CPUs; what it has lent stays lent until its users end."""
        if attempt.lends is not lends:
            attempt.lends = lends
            self.lenders.set(attempt.attempt_id, lends)
            self.loan_changes += 1
            self.touch("attempt", attempt.attempt_id)

    def _index_loans(self, attempt: AttemptRow) -> None:
        if attempt.lends:
            self.lenders.add(attempt.attempt_id)
        for lender in attempt.loans:
            self.lent_to.add(lender, attempt.attempt_id)

    def _end_loans(self, lender: AttemptRow) -> None:
        """End the loans by and to an ended attempt; what is still used of its CPUs is taken of the machine."""
        self.lenders.remove(lender.attempt_id)
        # Its own loans first: as much of them as the attempts below it use is now lent to these directly.
        left = dict(lender.loans)
        for id_ in list(self.lent_to.get(lender.attempt_id, ())):
            user = self.attempts[id_]
            missing = user.loans.pop(lender.attempt_id)
            self._known_shares.pop(user.job_id, None)
            for ancestor, cpu_milli in left.items():
                passed = min(missing, cpu_milli)
                if passed:
                    user.loans[ancestor] = user.loans.get(ancestor, 0) + passed
                    left[ancestor] -= passed
                    missing -= passed
            # There is room: the share of the lender was released just before, and its loans cover the rest.
            self._take_more_cpu(user, missing)
            self.lent_to.remove(lender.attempt_id, id_)
            self._index_loans(user)
            self.touch("attempt", id_)
        for ancestor in lender.loans:
            self.lent_to.remove(ancestor, lender.attempt_id)
        lender.lends, lender.loans = False, {}

    def _take_more_cpu(self, attempt: AttemptRow, cpu_milli: int) -> None:
        if cpu_milli:
            spec = self.jobs[attempt.job_id].spec
            self.pool_for(spec.reservation_id).take_cpu(attempt.node, cpu_milli)
            if not spec.reservation_id:
                self.charge(self.shares.tenant(spec.user, spec.namespace), Demand(cpu_milli=cpu_milli), "", 1)

    def cpu_to_lend(self, lender: AttemptRow) -> int:
        """Return the thousandths of CPUs of a lending attempt that no attempt below it uses."""
        lent = sum(
            self.attempts[attempt_id].loans[lender.attempt_id] for attempt_id in self.lent_to.get(lender.attempt_id, ())
        )
        return self.demand(self.jobs[lender.job_id]).cpu_milli - lent

    def drop_attempt(self, attempt: AttemptRow) -> None:
        del self.attempts[attempt.attempt_id]
        self.touch("attempt", attempt.attempt_id)

    def _index_ports(self) -> None:
        """Continue after the port numbers that were given last."""
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.placed_at):
            if attempt.node in self.pool.machines:
                self.pool.machines[attempt.node].ports.advance_past(attempt.ports.values())

    def avoid_ports(self, attempt: AttemptRow, until: float) -> None:
        """Give other ports of the machine first until then: a foreign process holds one of the attempt's."""
        node = self.nodes[attempt.node]
        avoided = {taken.port: taken.until for taken in node.taken_ports if taken.until > self.now}
        # All of the attempt's: the report does not say which of them is held.
        avoided |= dict.fromkeys(attempt.ports.values(), until)
        node.taken_ports = tuple(TakenPort(port, at) for port, at in avoided.items())
        self.pool.machines[node.name].ports.avoided = avoided
        self.touch("node", node.name)

    # Jobs

    def add_job(self, job: JobRow) -> None:
        job_id = job.job_id
        self.jobs[job_id] = job
        self._index_job(job)
        self.blob_refs.add(job.spec.payload)
        self.touch("job", job_id)

    def _index_job(self, job: JobRow) -> None:
        job_id = job.job_id
        spec = job.spec
        # Filled by `_index_attempt`; every job has an entry, so that no reader has to ask.
        self.generation_counts[job_id] = GenerationCount()
        if spec.job_group:
            self.group_members[spec.job_group].jobs[job_id] = None
            self.on_member_phase_changed(job, None)
        # Only ended jobs are left out of the indexes below: they have no name, no owner and no siblings any more.
        if job.ended:
            self._index_finished(job)
            return
        self.living_jobs.move(spec, None, job.phase)
        self.jobs_by_name.add((spec.namespace, spec.name), job_id)
        if job.owner:
            self.children.add(job.owner, job_id)
        if job.root:
            self.jobs_by_root.add(job.root, job_id)
        if spec.reservation_id:
            self.jobs_inside.add(spec.reservation_id, job_id)
        if spec.siblings is not None:
            self.sibling_groups.add(spec.siblings.group_id, job_id)
        if job.phase is JobPhase.QUEUED:
            self.enqueue(job)
        elif job.phase is JobPhase.HELD:
            self.index_hold(job)
        elif job.phase is JobPhase.CLOSING:
            self.ending_jobs.add(job_id)
        else:
            self._index_run(job)

    def _index_run(self, job: JobRow) -> None:
        self.running_by_band[job.band].add(_placed_entry(job))
        if (limit_at := job.time_limit_at) is not None:
            self.time_limits.add((limit_at, job.order, job.job_id))

    def on_phase_changed(self, job: JobRow, before: JobPhase) -> None:
        """Index a job by its new phase: whether it runs, or ends."""
        self._known_shares.pop(job.job_id, None)
        self.living_jobs.move(job.spec, before, job.phase)
        if before is JobPhase.QUEUED and job.spec.wait_limit_s is not None:
            self.timers.set(("wait", job.job_id), None)
        # STARTING to RUNNING changes nothing here: both indexes are by the time of placement.
        was_active, is_active = before in (JobPhase.STARTING, JobPhase.RUNNING), job.is_active
        if is_active and not was_active:
            self._index_run(job)
        elif was_active and not is_active:
            self.running_by_band[job.band].remove(_placed_entry(job))
            if job.time_limit_at is not None:
                self.time_limits.remove((job.time_limit_at, job.order, job.job_id))
        if job.phase is JobPhase.CLOSING:
            self.ending_jobs.add(job.job_id)
        elif before is JobPhase.CLOSING:
            del self.ending_jobs[job.job_id]

    def index_job_end(self, job: JobRow) -> None:
        """Move an ended job from the indexes of living jobs to those of ended ones."""
        job_id = job.job_id
        spec = job.spec
        self.jobs_by_name.remove((spec.namespace, spec.name), job_id)
        # Detached jobs have empty keys here; removing what is absent is allowed.
        self.children.remove(job.owner, job_id)
        self.jobs_by_root.remove(job.root, job_id)
        self.jobs_inside.remove(spec.reservation_id, job_id)
        if spec.siblings is not None:
            self.sibling_groups.remove(spec.siblings.group_id, job_id)
        self._index_finished(job)
        self.touch("job", job_id)

    def _index_finished(self, job: JobRow) -> None:
        job_id = job.job_id
        self.finished_jobs.add(job_id)
        # Only values that the store holds: those in a user's storage cost it nothing.
        if job.outcome is not None and job.outcome.value is not None:
            self.value_sizes.add(job_id, job.outcome.value_bytes)

    def drop_job(self, job: JobRow) -> None:
        for attempt in self.attempt_records(job):
            self.drop_attempt(attempt)
        self.value_sizes.remove(job.job_id)
        del self.jobs[job.job_id], self.generation_counts[job.job_id], self.finished_jobs[job.job_id]
        self.touch("job", job.job_id)
        if job.spec.job_group:
            self._drop_group_member(job)

    def index_hold(self, job: JobRow) -> None:
        """Index a held job by what it waits for first."""
        # One index for each kind of wait, so that a step looks only at those that its event may release.
        if job.is_gathered:
            self.group_members[job.spec.job_group].gathered.add(job.job_id)
        elif job.held_until is None:
            self.held_jobs.add(job.job_id)
        else:
            self.backoffs.add((job.held_until, job.order, job.job_id))

    def unindex_hold(self, job: JobRow) -> None:
        """Remove a job that is no longer held, or waits for something else now."""
        if job.is_gathered:
            self._ungather(job)
        elif job.job_id in self.held_jobs:
            self.held_jobs.remove(job.job_id)
        elif job.held_until is not None:
            self.backoffs.remove((job.held_until, job.order, job.job_id))

    def siblings_of(self, job: JobRow) -> list[JobRow]:
        """Return the living members of its supervised group, in order, and the job itself; only the job without one."""
        if job.spec.siblings is None:
            return [job]
        mates = [self.jobs[job_id] for job_id in self.sibling_groups.get(job.spec.siblings.group_id, ())]
        return mates if job in mates else [*mates, job]

    def count_living_jobs(self) -> int:
        # Two sizes instead of a walk: this is asked at every launch.
        return len(self.jobs) - len(self.finished_jobs)

    def put_job_tombstone(self, tombstone: JobTombstone) -> None:
        self.job_tombstones[tombstone.job_id] = tombstone
        self.touch("job_tombstone", tombstone.job_id)

    def drop_job_tombstone(self, job_id: JobId) -> None:
        del self.job_tombstones[job_id]
        self.touch("job_tombstone", job_id)

    # Payloads, values and checkpoints

    def is_blob_used(self, blob: BlobId) -> bool:
        """Return whether any row still needs this payload, value or checkpoint."""
        return blob in self.blob_refs

    def needs_payload(self, job: JobRow) -> bool:
        # An attempt on a silent machine may still be sent to its node again.
        return not job.ended or self.generation_counts[job.job_id].living > 0

    def count_blob_refs(self) -> BlobReferenceCounts:
        """Count the references of all rows."""
        found = BlobReferenceCounts()
        for job in self.jobs.values():
            if self.needs_payload(job):
                found.add(job.spec.payload)
            if job.checkpoint is not None:
                found.add(job.checkpoint.blob)
        outcomes: list[Outcome | None] = [row.outcome for row in self.jobs.values()]
        for outcome in [*outcomes, *(row.outcome for row in self.attempts.values())]:
            found.add(outcome.value if outcome else None)
        return found

    # Applicants: what waits for machines

    def applicant(self, job: JobRow) -> Applicant:
        """Return the job as an applicant for machines."""
        spec = job.spec
        return Applicant(
            job.job_id,
            self._shape(job),
            job.order,
            job.queued_at,
            band=job.band,
            tenant=self.shares.tenant(spec.user, spec.namespace),
            time_limit_s=spec.time_limit_s,
            owner=job.owner if is_child(job) else "",
        )

    def _shape(self, job: JobRow) -> PlacementShape:
        if job.spec.job_group:
            return PlacementShape(self.request_of(job), is_child(job), job.spec.reservation_id)
        # Shared among jobs that ask for the same: the queue tries each shape once a pass, not each job.
        return self.queue.shape_of(job.spec, is_child(job))

    def job_of(self, applicant: Applicant) -> JobRow | None:
        """Return the applying job, or the first job of an applying group; None for a reservation."""
        if applicant.kind is ApplicantKind.GROUP and applicant.id in self.group_members:
            return self.jobs[next(iter(self.group_members[applicant.id].gathered))]
        return self.jobs.get(applicant.id)

    def request_of(self, job: JobRow) -> PlacementRequest:
        """Return what the job requests; a member of a placed job group is confined to the group's place."""
        group = self.job_groups[job.spec.job_group] if job.spec.job_group else None
        # Before the first placement the group as a whole chooses the place.
        if group is None or group.place is None or not group.config.same:
            return request_of(job.spec)
        return confine_to(request_of(job.spec), group.config.same, group.place)

    def preferred_nodes(self, applicant: Applicant) -> tuple[tuple[NodeName, ...], ...]:
        """Return the nodes of the previous generation, by part and member; empty for no preference."""
        if applicant.kind is ApplicantKind.GROUP:
            return tuple(job.previous_nodes for job in self.gathered_jobs(applicant.id))
        job = self.jobs.get(applicant.id)
        return (job.previous_nodes,) if job is not None and job.previous_nodes else ()

    def enqueue(self, job: JobRow) -> None:
        self.queue.add(self.applicant(job))
        self._set_wait_limit(job, job.queued_at)

    def _set_wait_limit(self, job: JobRow, since: float) -> None:
        if job.spec.wait_limit_s is not None:
            self.timers.set(("wait", job.job_id), since + job.spec.wait_limit_s)

    # Job groups

    def add_group(self, group: JobGroupRow) -> None:
        self.job_groups[group.group_id] = group
        self._index_group(group)
        self.touch("job_group", group.group_id)

    def _index_group(self, group: JobGroupRow) -> None:
        self.group_members[group.group_id] = GroupMembers()
        if group.ended_at is None:
            self.group_names.add((group.namespace, group.config.name), group.group_id)

    def index_group_end(self, group: JobGroupRow) -> None:
        """Index a group whose last job has ended."""
        self.group_names.remove((group.namespace, group.config.name), group.group_id)
        self.touch("job_group", group.group_id)

    def _drop_group_member(self, job: JobRow) -> None:
        """Drop a job from its group, and the group with its last job."""
        group_id = job.spec.job_group
        members = self.group_members[group_id]
        members.jobs.pop(job.job_id)
        # The group's record says how its members ended: it stays as long as the last of them.
        if not members.jobs:
            del self.job_groups[group_id], self.group_members[group_id]
            self.touch("job_group", group_id)

    def on_member_phase_changed(self, job: JobRow, before: JobPhase | None) -> None:
        self.group_members[job.spec.job_group].on_phase_changed(job.job_id, stage_of(job.spec), before, job.phase)

    def gathered_jobs(self, group_id: str) -> list[JobRow]:
        """Return the members that are placed together next, in order of acceptance."""
        return sorted(map(self.jobs.__getitem__, self.group_members[group_id].gathered), key=lambda job: job.order)

    def gather(self, job: JobRow) -> None:
        """Mark a member that only waits to be placed with its group."""
        job.is_gathered = True
        self.group_members[job.spec.job_group].gathered.add(job.job_id)
        self.touch("job", job.job_id)

    def _ungather(self, job: JobRow) -> None:
        job.is_gathered = False
        members = self.group_members[job.spec.job_group]
        self.timers.set(("wait", job.job_id), None)  # also if the group has left the queue, as it is being placed
        if job.spec.job_group in self.queue:
            self.queue.remove(job.spec.job_group)
            # The queue holds the group as one applicant, so all its members stop waiting when one leaves.
            for mate in members.gathered:
                self.timers.set(("wait", mate), None)
        members.gathered.remove(job.job_id)

    def enqueue_group_if_complete(self, group_id: str) -> None:
        """Queue a group all of whose living members have gathered."""
        if self.group_members[group_id].is_complete and group_id not in self.queue:
            group = self.job_groups[group_id]
            self.queue.add(self._group_applicant(group))
            for job in self.gathered_jobs(group_id):
                self._set_wait_limit(job, group.queued_at)

    def _group_applicant(self, group: JobGroupRow) -> Applicant:
        jobs = self.gathered_jobs(group.group_id)
        spec = jobs[0].spec
        request = PlacementRequest(tuple(part_of(job.spec) for job in jobs), group.config.same)
        return Applicant(
            group.group_id,
            PlacementShape(request, is_child(jobs[0]), spec.reservation_id),
            group.order,
            group.queued_at,
            ApplicantKind.GROUP,
            jobs[0].band,
            self.shares.tenant(spec.user, spec.namespace),
            _group_time_limit_s([job.spec for job in jobs]),
        )

    # Sessions

    def put_session(self, session: Session) -> None:
        self.sessions[session.session] = session
        self.session_changed(session)

    def session_changed(self, session: Session) -> None:
        self._unindex_session(session)
        self._index_session(session)
        self.touch("session", session.session)

    def _index_session(self, session: Session) -> None:
        if session.attempt_id:
            self.sessions_of.add(session.attempt_id, session.session)
        if session.phase is SessionPhase.LOST and not session.attempt_id:
            self.lost_drivers.add(session.session)
        elif session.phase is SessionPhase.CLOSING:
            self.closing_sessions.add(session.session)
        elif session.phase is SessionPhase.ENDED:
            self.ended_sessions.add(session.session)

    def _unindex_session(self, session: Session) -> None:
        # From all three, whatever its last phase was: rows are changed in place, so the old phase is not known here.
        for index in (self.lost_drivers, self.closing_sessions, self.ended_sessions):
            index.remove(session.session)

    def drop_session(self, session: Session) -> None:
        del self.sessions[session.session]
        self._unindex_session(session)
        if session.attempt_id:
            self.sessions_of.remove(session.attempt_id, session.session)
        self.touch("session", session.session)

    # Names of actors

    def put_registration(self, registration: ActorRegistration) -> None:
        self.registrations[registration.endpoint.actor_id] = registration
        self._index_registration(registration)
        self.touch("registration", registration.endpoint.actor_id)

    def _index_registration(self, registration: ActorRegistration) -> None:
        endpoint = registration.endpoint
        self.registrations_by_key.add(registration_key(registration), endpoint.actor_id)
        self.registrations_by_incarnation.add(endpoint.incarnation, endpoint.actor_id)

    def drop_registration(self, registration: ActorRegistration) -> None:
        endpoint = registration.endpoint
        del self.registrations[endpoint.actor_id]
        self.registrations_by_key.remove(registration_key(registration), endpoint.actor_id)
        self.registrations_by_incarnation.remove(endpoint.incarnation, endpoint.actor_id)
        self.touch("registration", endpoint.actor_id)

    def put_actor_tombstone(self, tombstone: ActorTombstone) -> None:
        # Popped first, since a dict keeps the place of a key that is set again: the oldest must come first.
        self.actor_tombstones.pop(tombstone.actor_id, None)
        self.actor_tombstones[tombstone.actor_id] = tombstone
        self.touch("actor_tombstone", tombstone.actor_id)

    def drop_actor_tombstone(self, actor_id: ActorId) -> None:
        if self.actor_tombstones.pop(actor_id, None) is not None:
            self.touch("actor_tombstone", actor_id)


def name_key(namespace: Namespace, name: str) -> str:
    return f"name:{namespace}/{name}"


def actor_key(actor_id: ActorId) -> str:
    return f"actor:{actor_id}"


def registration_key(registration: ActorRegistration) -> str:
    return name_key(registration.endpoint.namespace, registration.endpoint.name)


def _placed_entry(job: JobRow) -> TimedJob:
    return job.placed_at or 0.0, job.order, job.job_id


def _group_time_limit_s(specs: list[JobSpec]) -> float | None:
    """Return seconds after which all jobs have surely ended, less the first job's termination; None if unknown."""
    ends = [spec.time_limit_s + _termination_s(spec) for spec in specs if spec.time_limit_s is not None]
    # Back-fill adds the termination of one job to this, so that of the first is taken off; all must have a limit, or
    # the end of the group is unknown.
    return max(ends) - _termination_s(specs[0]) if len(ends) == len(specs) else None


def _termination_s(spec: JobSpec) -> float:
    return spec.termination.cancel_s + spec.termination.term_s
