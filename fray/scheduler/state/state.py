"""`State`: all tables of the scheduler, with the queries of the controller.

Only `fray.scheduler.step.step` changes it. Everything public in this module reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import evolve, frozen

from fray.errors import NoSuchReservation, SessionEnded
from fray.model.gangs import is_gang, port_names, role_of
from fray.model.ids import AttemptId, JobId, NodeName, SessionId, attempt_id
from fray.model.messages.node import NodeHello
from fray.model.policy.policy import Policy
from fray.model.reservations import ReservationId
from fray.model.specs import (
    DesiredAttempt,
    EndReason,
    GangMember,
    GangRoster,
)
from fray.scheduler.lifecycle import AttemptPhase, NodePhase
from fray.scheduler.state.reservation_rows import ReservationRow
from fray.scheduler.state.rows import ActorRegistration, AttemptRow, Node, SchedulerConfig, Session
from fray.scheduler.state.tables import Tables

ROSTERS_LIMIT = 64
"""Gang rosters in the cache; beyond it the cache is emptied."""
ROSTER_LIMIT = 1_000
"""Members of a job group up to which they get each other's addresses: the number of addresses grows with its square."""
SILENT_PHASES = (NodePhase.SUSPECT, NodePhase.LOST)


@frozen
class StateSettings:
    """Knowledge of the scheduler that is not stored: the controller says it at each start."""

    policy: Policy
    declares_all_nodes: bool
    declared_nodes: tuple[NodeHello, ...]
    cluster: str
    fleet_policy: Policy


class State(Tables):
    """State of the scheduler.

    Args:
        now: first value of the scheduler's clock, seconds since the epoch.
        config: limits; default `SchedulerConfig()`.
    """

    def __init__(self, now: float = 0.0, config: SchedulerConfig | None = None) -> None:
        super().__init__(now, config)
        self.declares_all_nodes = False
        self.declared_nodes: tuple[NodeHello, ...] = ()
        self._rosters: dict[tuple[JobId, int], GangRoster] = {}
        """Rosters of gangs whose desired attempts were requested lately, by job and generation."""

    @classmethod
    def restore(
        cls, rows: Iterable[tuple[str, str, object]], now: float, config: SchedulerConfig | None = None
    ) -> State:
        """Build the state from stored rows ``(table, key, row)``; step `ControllerStarted` next."""
        state = cls(now, config)
        state.load(rows)
        # The stored clock if the wall clock was set back meanwhile: deadlines in rows are times of that clock.
        state.meta.now = max(state.meta.now, now)
        return state

    # Back to what is stored

    def settings(self) -> StateSettings:
        """Return what is in no row: the policy and what the controller has said at its start."""
        fleet = self.fleet
        return StateSettings(self.policy, self.declares_all_nodes, self.declared_nodes, fleet.cluster, fleet.policy)

    def reload(self, rows: Iterable[tuple[str, str, object]], now: float, settings: StateSettings) -> None:
        """Become what the stored rows ``(table, key, row)`` say: a step has raised, and may have done half of its
        changes.

        Not a restart: connections are as they were, so that nodes and sessions keep their phases.
        """
        fresh = State.restore(rows, now, self.config)
        fresh.declares_all_nodes, fresh.declared_nodes = settings.declares_all_nodes, settings.declared_nodes
        fresh.set_policy(settings.policy, is_initial=True)
        fresh.fleet.cluster, fresh.fleet.policy = settings.cluster, settings.fleet_policy
        # Plans are in no row: the next one is made at once.
        fresh.fleet.is_plan_due_soon = True
        # In place: connections and views refer to this object. Nothing outside refers to a table or an index of it for
        # longer than a call.
        self.__dict__ = fresh.__dict__

    @property
    def knows_all_machines(self) -> bool:
        """Return whether all machines the cluster has or can have are known: what fits none of them can never run."""
        return self.declares_all_nodes or bool(self.policy.groups)

    def open_session(self, name: SessionId) -> Session:
        """Return the session, if it may still make requests.

        Raises:
            SessionEnded: it has ended, or its attempt has.
        """
        session = self.sessions.get(name)
        # Also in CLOSING: what is launched then would be owned by something that is being ended.
        if session is None or session.is_ending:
            reason = session.reason if session else "unknown session"
            raise SessionEnded(f"session {name} has ended ({reason}): open the cluster again", reason=reason)
        return session

    # Jobs

    def has_job_ended(self, job_id: JobId) -> bool:
        """Return whether the job has ended or is unknown."""
        job = self.jobs.get(job_id)
        return job is None or job.ended

    # Reservations

    def find_reservation(self, reservation_id: ReservationId) -> ReservationRow:
        """Return the row of a reservation.

        Raises:
            NoSuchReservation: no reservation of this id is on record.
        """
        found = self.reservations.get(reservation_id)
        if found is None:
            raise NoSuchReservation(
                f"no reservation {reservation_id!r} on record (it may have ended long ago)",
                reservation_id=reservation_id,
            )
        return found

    def open_reservation(self, reservation_id: ReservationId) -> ReservationRow:
        """Return the row of a reservation that has not ended.

        Raises:
            NoSuchReservation: it is not on record, or has ended.
        """
        reservation = self.find_reservation(reservation_id)
        if reservation.is_closed:
            raise NoSuchReservation(
                f"reservation {reservation_id} has ended: {reservation.reason}", reservation_id=reservation_id
            )
        return reservation

    # Sessions and owners

    def owned_jobs(self, session: SessionId) -> tuple[JobId, ...]:
        """Return the living jobs of a session, direct and below, oldest first."""
        known = self.sessions.get(session)
        if known is None or known.attempt_id is None:
            return tuple(self.jobs_by_root.get(session, ()))
        return tuple(self.jobs_below(known.attempt_id))

    def jobs_below(self, owner: str) -> Iterator[JobId]:
        """Yield the living jobs owned by a session, attempt or job, by these and their attempts, and so on."""
        for job_id in self.children.get(owner, ()):
            yield job_id
            yield from self.jobs_below(job_id)
            for attempt in self.living_members(self.jobs[job_id]):
                yield from self.jobs_below(attempt.attempt_id)

    def is_attempt_living(self, attempt_id: AttemptId) -> bool:
        """Return whether neither the attempt nor its job has ended: its process may connect, launch and hold names."""
        attempt = self.attempts.get(attempt_id)
        # An attempt on a silent machine may live after its job was committed: its process may do nothing any more.
        return attempt is not None and attempt.living and not self.jobs[attempt.job_id].ended

    # Nodes and desired attempts

    def is_desired(self, attempt_id: AttemptId) -> bool:
        """Return whether `desired_attempt` returns something or the attempt is reserved."""
        attempt = self.attempts.get(attempt_id)
        return attempt is not None and attempt.living

    def desired_attempt(self, attempt_id: AttemptId) -> DesiredAttempt | None:
        """Return the desired state of an attempt; None if it should not exist: its node ends and removes it."""
        attempt = self.attempts.get(attempt_id)
        # RESERVED counts as unwanted for the node, though `is_desired` holds: a delta must not announce its removal.
        if attempt is None or not attempt.living or attempt.phase is AttemptPhase.RESERVED:
            return None
        job = self.jobs[attempt.job_id]
        return DesiredAttempt(
            attempt_id=attempt_id,
            # The node needs the devices that were chosen; without alternatives the spec is passed on and not copied.
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
        """Return the addresses of all members of a gang, also of ended ones; they never change, so they are cached."""
        job = self.jobs[attempt.job_id]
        if not is_gang(job.spec):
            return None
        key = job.job_id, attempt.generation
        if key not in self._rosters:
            # Emptied as a whole: a roster is made again in one pass over its gang.
            if len(self._rosters) >= ROSTERS_LIMIT:
                self._rosters.clear()
            ids = (attempt_id(*key, member) for member in range(job.spec.members))
            self._rosters[key] = GangRoster.of(
                [GangMember(host=self.attempts[i].host, ports=self.attempts[i].ports) for i in ids]
            )
        return self._rosters[key]

    def _group_rosters(self, group_id: str) -> dict[str, GangRoster]:
        """Return addresses by role, in order of acceptance and rank; only the ports that all jobs of a role have."""
        found: dict[str, list[AttemptRow]] = {}
        for job in map(self.jobs.__getitem__, self.group_members[group_id].jobs):
            if port_names(job.spec):
                found.setdefault(role_of(job.spec).name, []).extend(self.members(job))
        few = sum(map(len, found.values())) <= ROSTER_LIMIT
        return {role: _roster_of(attempts) for role, attempts in found.items() if attempts} if few else {}

    def desired_attempts(self, node: NodeName) -> tuple[DesiredAttempt, ...]:
        """Return all desired attempts of a node."""
        attempts = (self.desired_attempt(attempt_id) for attempt_id in self.on_node.get(node, ()))
        return tuple(attempt for attempt in attempts if attempt is not None)

    def is_suspect(self, attempt: AttemptRow) -> bool:
        """Return whether the attempt's machine has been silent for ``suspect_s``."""
        return attempt.living and self.nodes[attempt.node].phase in SILENT_PHASES

    # Names

    def is_hidden(self, registration: ActorRegistration) -> bool:
        """Return whether the actor's machine is silent: callers get an error, and the name stays registered."""
        attempt = self.attempts.get(registration.endpoint.incarnation)
        return attempt is not None and self.is_suspect(attempt)

    # Placement

    def placement_inputs(self) -> object:
        """Return the inputs of a placement pass: while they are the same, so is its result."""
        pools = [pool.changes for pool in self.reservation_pools.values()]
        return self.pool.changes, self.pool.version, self.queue.changes, self.shares.ranked_at, pools, self.loan_changes

    # Time

    def next_deadline(self) -> float | None:
        """Return when the next `Tick` is due, by the scheduler's clock; None if there is no timer."""
        # Only exceptional rows are walked over: silent nodes and lost drivers. The other times are heads of sorted
        # indexes.
        nodes = (node_deadline(self.nodes[name], self.config) for name in self.not_alive)
        sessions = (self.sessions[name].lost_at + self.sessions[name].grace_s for name in self.lost_drivers)
        held = (self.backoffs[0][0],) if self.backoffs else ()
        timed = self.timers.first()
        over = (self.time_limits[0][0],) if self.time_limits else ()
        single = (at for at in (timed, self.fleet.due_at) if at is not None)
        return min([*nodes, *sessions, *held, *over, *single], default=None)


def node_deadline(node: Node, config: SchedulerConfig) -> float:
    """Return when the phase of a silent node changes next."""
    # A cordoned machine may be away for its repair for weeks, and must still be cordoned when it comes back.
    keep_s = config.forget_node_s if node.operator_cordon is None else config.forget_cordoned_s
    waits = {
        NodePhase.SILENT: config.suspect_s,
        # All counted from the beginning of the silence, not from the phase before.
        NodePhase.SUSPECT: config.lease_s,
        NodePhase.LOST: config.lease_s + keep_s,
    }
    return node.silent_since + waits[node.phase]


def _roster_of(attempts: list[AttemptRow]) -> GangRoster:
    shared = [name for name in attempts[0].ports if all(name in attempt.ports for attempt in attempts)]
    return GangRoster.of([GangMember(host=a.host, ports={name: a.ports[name] for name in shared}) for a in attempts])
