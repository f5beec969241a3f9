"""`State`: the law's memory, and the windows through which the controller looks into it.

Only `fray.scheduler.step.step` changes it. Everything public here reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import evolve

from fray.errors import NoSuchReservation
from fray.model.gangs import is_gang, port_names, role_of
from fray.model.ids import AttemptId, JobId, NodeName, SessionId, attempt_id
from fray.model.messages.node import NodeHello
from fray.model.reservations import ReservationId
from fray.model.specs import (
    DesiredAttempt,
    EndReason,
    GangMember,
    GangRoster,
)
from fray.scheduler.lifecycle import AttemptPhase, NodePhase, SessionPhase
from fray.scheduler.state.reservation_rows import ReservationRow
from fray.scheduler.state.rows import ActorRegistration, AttemptRow, Node, SchedulerConfig
from fray.scheduler.state.tables import Tables

ROSTERS_LIMIT = 64
"""Gangs that are put together once; of more at a time, again and again."""
MATES_LIMIT = 1_000
"""Members of larger groups are not told each other's addresses: every one would be told of every other."""
SILENT_PHASES = (NodePhase.SUSPECT, NodePhase.LOST)


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

    def has_job_ended(self, job_id: JobId) -> bool:
        """Ended, or unknown."""
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
        return attempt.living and self.nodes[attempt.node].phase in SILENT_PHASES

    # Names

    def is_hidden(self, binding: ActorRegistration) -> bool:
        """Its machine is silent: callers are told so, but the name is kept."""
        attempt = self.attempts.get(binding.endpoint.incarnation)
        return attempt is not None and self.is_suspect(attempt)

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
