"""`State`: the law's memory, and the windows through which the controller looks into it.

Only `fray.scheduler.step.step` changes it. Everything public here reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve

from fray.errors import NoSuchJob
from fray.model.gangs import is_gang, port_names, role_of
from fray.model.ids import INTERNAL_PREFIX, ActorId, AttemptId, JobId, Namespace, NodeName, SessionId, attempt_id
from fray.model.messages.client import Names, NodeInfo
from fray.model.messages.node import NodeHello
from fray.model.reservations import ReservationId, ReservationInfo
from fray.model.specs import (
    RESULT_GONE,
    AttemptInfo,
    DesiredAttempt,
    EndReason,
    GangMember,
    GangRoster,
    JobInfo,
    JobState,
    Outcome,
)
from fray.scheduler.explain.explain import reason
from fray.scheduler.lifecycle import FINAL_STATE, job_state
from fray.scheduler.nodes.availability import out_of_service_text, service_state
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.rows import (
    ActorRegistration,
    AttemptPhase,
    AttemptRow,
    Node,
    NodePhase,
    SchedulerConfig,
    SessionPhase,
)
from fray.scheduler.state.tables import Tables

_NOTHING_YET = Outcome(cause=EndReason.SUCCEEDED)
"""Whose codes and values a job shows before it has an outcome: none."""
ROSTERS_LIMIT = 64
"""Gangs that are put together once; of more at a time, again and again."""
MATES_LIMIT = 1_000
"""Members of larger groups are not told each other's addresses: every one would be told of every other."""
_SILENT = (NodePhase.SUSPECT, NodePhase.LOST)


class State(Tables):
    """All the law knows.

    Args:
        now: first value of the law's time, seconds since the epoch.
        rules: limits; default `Rules()`.
    """

    def __init__(self, now: float = 0.0, config: SchedulerConfig | None = None) -> None:
        super().__init__(now, config)
        self.declares_all_nodes = False
        self.declared_nodes: tuple[NodeHello, ...] = ()
        self._rosters: dict[tuple[JobId, int], GangRoster] = {}
        """Of gangs whose wishes were asked for lately, by job and generation."""

    @classmethod
    def restore(
        cls, rows: Iterable[tuple[str, str, object]], now: float, config: SchedulerConfig | None = None
    ) -> State:
        """The state again from stored rows ``(table, key, row)``; step `Restarted` next."""
        state = cls(now, config)
        state.load(rows)
        state.meta.now = max(state.meta.now, now)
        return state

    # Jobs

    def job_info(self, job_id: JobId, *, explained: bool = True) -> JobInfo:
        """All that is known of a job.

        Args:
            explained: with the reason why it waits; that takes a look at the machines.

        Raises:
            NoSuchJob.
        """
        job = self.jobs.get(job_id)
        if job is None:
            return self._tombstone_info(job_id)
        outcome = job.outcome or _NOTHING_YET
        return JobInfo(
            job_id=job_id,
            name=job.spec.name,
            state=job_state(job),
            error_message=error_message(job.outcome) or (RESULT_GONE if job.value_forgotten else None),
            start_time=job.started_at,
            end_time=job.ended_at,
            namespace=job.spec.namespace,
            owner=job.owner,
            cause=job.outcome.cause if job.outcome else None,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            value=outcome.value,
            stored=outcome.stored,
            reason=reason(self, job) if explained else "",
            attempts=tuple(map(_attempt_info, self.attempt_records(job))),
            ended_by=job.ended_by,
            launch_time=job.launched_at,
            parent=job.parent,
            user=job.spec.user,
            retries={cause.value: count for cause, count in job.retries.items()},
            first_member=job.first_member if job.spec.members > 1 else None,
            job_group=job.spec.job_group,
            role=role_of(job.spec).name if job.spec.job_group else "",
            absorbed=job.is_absorbed,
        )

    def _tombstone_info(self, job_id: JobId) -> JobInfo:
        past = self.job_tombstones.get(job_id)
        if past is None:
            raise NoSuchJob(f"the cluster knows no job {job_id!r} (it may be long over)", job_id=job_id)
        message = error_message(Outcome(cause=past.cause, message=past.message))
        return JobInfo(
            job_id=job_id,
            name=past.name,
            state=FINAL_STATE[past.cause],
            error_message=message or (RESULT_GONE if past.had_value else None),
            end_time=past.ended_at,
            namespace=past.namespace,
            cause=past.cause,
            exit_code=past.exit_code,
        )

    def list_jobs(
        self,
        namespace: Namespace | None = None,
        *,
        name: str = "",
        prefix: str = "",
        states: Sequence[JobState] = (),
        limit: int = 0,
    ) -> tuple[JobInfo, ...]:
        """Jobs on record, newest last: of one namespace, of one name, of names or ids that start so, in some states."""
        found = [
            job.job_id
            for job in self.jobs.values()
            if namespace in (None, job.spec.namespace)
            and (not name or job.spec.name == name)
            and job.job_id.startswith(prefix)  # an id is the name, and more
            and (not states or job_state(job) in states)
        ]
        return tuple(map(self.job_info, found[-limit:]))

    def has_job_ended(self, job_id: JobId) -> bool:
        """Ended, or unknown."""
        job = self.jobs.get(job_id)
        return job is None or job.ended

    # Reservations

    def reservation_info(self, reservation_id: ReservationId) -> ReservationInfo:
        """Raises: NoSuchReservation."""
        return reservation_info(self, reservation_id)

    # Sessions and owners

    def owned_jobs(self, session: SessionId) -> tuple[JobId, ...]:
        """Living jobs of a session, direct and below, oldest first."""
        known = self.sessions.get(session)
        if known is None or known.attempt_id is None:
            return tuple(self.jobs_by_root.get(session, ()))
        return tuple(self.jobs_below(known.attempt_id))

    def jobs_below(self, owner: str) -> Iterator[JobId]:
        """Living jobs owned by a session or attempt, and by their attempts, and so on."""
        for job_id in self.children.get(owner, ()):
            yield job_id
            for attempt in self.living_members(self.jobs[job_id]):
                yield from self.jobs_below(attempt.attempt_id)

    def is_session_living(self, session: SessionId) -> bool:
        """It lives: connected, in its grace, or being ended."""
        known = self.sessions.get(session)
        return known is not None and known.phase is not SessionPhase.ENDED

    def is_attempt_living(self, attempt_id: AttemptId) -> bool:
        """Neither it nor its job has ended: its process may dial the controller, launch, and hold names."""
        attempt = self.attempts.get(attempt_id)
        return attempt is not None and attempt.living and not self.jobs[attempt.job_id].ended

    # Nodes and wishes

    def is_desired(self, attempt_id: AttemptId) -> bool:
        """There is a `wish` for it."""
        attempt = self.attempts.get(attempt_id)
        return attempt is not None and attempt.living

    def desired_attempt(self, attempt_id: AttemptId) -> DesiredAttempt | None:
        """What is wanted of an attempt; None: nothing, its node ends and forgets it."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or not attempt.living or attempt.phase is AttemptPhase.RESERVED:
            return None
        job = self.jobs[attempt.job_id]
        return DesiredAttempt(
            attempt_id=attempt_id,
            spec=evolve(job.spec, demand=self.demand(job)) if job.choice else job.spec,
            devices=attempt.devices,
            ports=attempt.ports,
            roster=self._gang_roster(attempt),
            group_members=self._group_rosters(job.spec.job_group) if job.spec.job_group else {},
            stop=attempt.stop_cause is not None,
            stop_cause=attempt.stop_cause or EndReason.STOPPED,
            notice_s=job.notice_s if attempt.stop_cause is EndReason.PREEMPTED else None,
        )

    def _gang_roster(self, attempt: AttemptRow) -> GangRoster | None:
        """All of its gang, the ended ones too: what a member is told never changes, so it is put together once."""
        job = self.jobs[attempt.job_id]
        if not is_gang(job.spec):
            return None
        key = job.job_id, attempt.generation
        if key not in self._rosters:
            if len(self._rosters) >= ROSTERS_LIMIT:
                self._rosters.clear()
            ids = (attempt_id(*key, member) for member in range(job.spec.members))
            self._rosters[key] = GangRoster.of(
                [GangMember(host=self.attempts[i].host, ports=self.attempts[i].ports) for i in ids]
            )
        return self._rosters[key]

    def _group_rosters(self, group_id: str) -> dict[str, GangRoster]:
        """By role, in order of acceptance and rank; of a role whose jobs differ the ports they all have."""
        found: dict[str, list[AttemptRow]] = {}
        for job in map(self.jobs.__getitem__, self.group_members[group_id].jobs):
            if port_names(job.spec):
                found.setdefault(role_of(job.spec).name, []).extend(self.members(job))
        few = sum(map(len, found.values())) <= MATES_LIMIT
        return {role: _roster_of(attempts) for role, attempts in found.items() if attempts} if few else {}

    def desired_attempts(self, node: NodeName) -> tuple[DesiredAttempt, ...]:
        """The complete wanted set of a node."""
        wishes = (self.desired_attempt(attempt_id) for attempt_id in self.on_node.get(node, ()))
        return tuple(wish for wish in wishes if wish is not None)

    def is_suspect(self, attempt: AttemptRow) -> bool:
        """Its machine has been silent for ``suspect_s``."""
        return attempt.living and self.nodes[attempt.node].phase in _SILENT

    def nodes_info(self) -> tuple[NodeInfo, ...]:
        return tuple(self.node_info(self.nodes[name]) for name in sorted(self.nodes))

    def node_info(self, node: Node) -> NodeInfo:
        machine = self.pool.machines[node.name]
        return NodeInfo(
            name=node.name,
            alive=node.phase not in _SILENT,
            cpu_milli=node.capacity.cpu_milli,
            cpu_milli_free=machine.cpu_milli,
            memory_bytes=node.capacity.memory_bytes,
            memory_bytes_free=machine.memory_bytes,
            devices=tuple(device.id for device in node.capacity.devices),
            attributes=dict(node.capacity.attributes),
            attempts=machine.attempts,
            pid=node.process.pid if node.process else None,
            host=node.host,
            ports=str(node.capacity.ports),
            ports_free=machine.ports.free,
            busy=dict(node.busy),
            standing=service_state(node),
            standing_reason=out_of_service_text(node, self.now),
            granted={device: id_ for id_ in self.on_node.get(node.name, ()) for device in self.attempts[id_].devices},
        )

    # Names

    def names(self, key: str) -> Names:
        """All living actors under a key (see `Watch.key`), oldest first; those of silent machines left out."""
        kind, _, rest = key.partition(":")
        if kind == "actor":
            return self._names_of_actor(key, rest)
        found = sorted(
            (self.registrations[actor] for actor in self.registrations_by_key.get(key, ())), key=lambda b: b.order
        )
        return Names(key=key, endpoints=tuple(b.endpoint for b in found if not self.is_hidden(b)))

    def is_hidden(self, binding: ActorRegistration) -> bool:
        """Its machine is silent: callers are told so, but the name is kept."""
        attempt = self.attempts.get(binding.endpoint.incarnation)
        return attempt is not None and self.is_suspect(attempt)

    def _names_of_actor(self, key: str, actor_id: ActorId) -> Names:
        binding = self.registrations.get(actor_id)
        if binding is None:
            silent = self._silent_member(actor_id)
            ended = self._silence_outcome(silent) if silent else self._end_of_actor(actor_id)
            return Names(key=key, endpoints=(), ended=ended, may_return=silent is not None)
        if self.is_hidden(binding):
            silence = self._silence_outcome(self.attempts[binding.endpoint.incarnation])
            return Names(key=key, endpoints=(), ended=silence, may_return=True)
        return Names(key=key, endpoints=(binding.endpoint,))

    def _silent_member(self, actor_id: ActorId) -> AttemptRow | None:
        """The attempt of a living actor that is on a silent machine."""
        job = self.jobs.get(actor_id)
        return next(filter(self.is_suspect, self.members(job)), None) if job is not None and not job.ended else None

    def _end_of_actor(self, actor_id: ActorId) -> Outcome | None:
        """Why no actor of this id is there; None: it is on its way."""
        job = self.jobs.get(actor_id)
        if job is not None:
            return job.outcome
        if actor_id in self.actor_tombstones:
            return self.actor_tombstones[actor_id].outcome
        if actor_id.startswith(INTERNAL_PREFIX):
            return None  # a shelf (`fray.runtime.shelf`) that is about to be registered; who waits for it has a bound
        return Outcome(cause=EndReason.FAILURE, message="no such actor")

    def _silence_outcome(self, attempt: AttemptRow) -> Outcome:
        silent_s = self.now - self.nodes[attempt.node].silent_since
        return Outcome(
            cause=EndReason.MACHINE_LOST,
            message=f"its machine {attempt.node} has been silent for {silent_s:.0f} s",
        )

    # Time

    def next_deadline(self) -> float | None:
        """When a `Tick` is due, by the law's time; None: nothing is timed."""
        nodes = (node_deadline(self.nodes[name], self.config) for name in self.not_alive)
        sessions = (self.sessions[name].lost_at + self.sessions[name].grace_s for name in self.lost_drivers)
        held = (self.backoffs[0][0],) if self.backoffs else ()
        timed = self.timers.first()
        over = (self.time_limits[0][0],) if self.time_limits else ()
        single = (at for at in (timed, self.fleet.plan_at) if at is not None)
        return min([*nodes, *sessions, *held, *over, *single], default=None)


def node_deadline(node: Node, config: SchedulerConfig) -> float:
    """When a silent node's next turn is due."""
    keep_s = config.forget_node_s if node.cordon is None else config.forget_cordoned_s
    waits = {
        NodePhase.SILENT: config.suspect_s,
        NodePhase.SUSPECT: config.lease_s,
        NodePhase.LOST: config.lease_s + keep_s,
    }
    return node.silent_since + waits[node.phase]


def _roster_of(attempts: list[AttemptRow]) -> GangRoster:
    shared = [name for name in attempts[0].ports if all(name in attempt.ports for attempt in attempts)]
    return GangRoster.of([GangMember(host=a.host, ports={name: a.ports[name] for name in shared}) for a in attempts])


def error_message(outcome: Outcome | None) -> str | None:
    """A finished job's trouble in words; None while it lives and on success."""
    if outcome is None or outcome.cause is EndReason.SUCCEEDED:
        return None
    return outcome.message or outcome.cause.value.replace("_", " ")


def _attempt_info(attempt: AttemptRow) -> AttemptInfo:
    outcome = attempt.outcome
    if outcome is None:
        return AttemptInfo(
            attempt_id=attempt.attempt_id,
            node=attempt.node,
            pid=attempt.pid,
            start_time=attempt.started_at,
            ports=attempt.ports,
            host=attempt.host,
            place_time=attempt.placed_at,
        )
    return AttemptInfo(
        attempt_id=attempt.attempt_id,
        node=attempt.node,
        cause=outcome.cause,
        message=outcome.message,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        pid=attempt.pid,
        start_time=attempt.started_at,
        end_time=attempt.ended_at,
        ports=attempt.ports,
        host=attempt.host,
        peak_memory_bytes=outcome.peak_memory_bytes,
        cpu_s=outcome.cpu_s,
        swept=outcome.swept,
        captured=outcome.captured,
        place_time=attempt.placed_at,
        duration_s=outcome.duration_s,
    )
