"""What the law remembers: one class a table, plain typed fields only, so that each row is one JSON text in the store.

`TABLES` maps the name of a table to the class of its rows.
"""

from __future__ import annotations

from attrs import Factory, define, frozen

from fray.model.ids import ActorId, AttemptId, BlobId, JobId, Namespace, NodeName, SessionId
from fray.model.job_groups import JobGroupConfig
from fray.model.messages.client import ActorEndpoint, ProcessMark, Role
from fray.model.policy.priority import Band
from fray.model.resources import Capacity, Demand
from fray.model.specs import EndReason, JobSpec, JobState, Outcome
from fray.scheduler.lifecycle import FINAL_STATE, LIVING_STATE, AttemptPhase, JobPhase, NodePhase, SessionPhase
from fray.scheduler.queue.fair_share import Usage
from fray.scheduler.state.reservation_rows import ReservationRow
from fray.scheduler.state.unit_rows import CloudUnit, GroupRow


@frozen(kw_only=True)
class StoredCheckpoint:
    """The latest checkpoint of an actor."""

    attempt_id: AttemptId
    """Whose it is."""
    number: int
    blob: BlobId | None = None
    location: str = ""
    saved_at: float = 0.0


@define(kw_only=True)
class JobRow:
    spec: JobSpec
    order: int
    """Place in the order of acceptance; a retry keeps it."""
    owner: str
    """Session or attempt whose end ends this job; empty when detached."""
    root: SessionId = ""
    """The driver's session at the top of the chain of owners; empty below a detached job."""
    launched_by: SessionId = ""
    parent: JobId = ""
    """The job whose process launched it."""
    launched_at: float = 0.0
    queued_at: float = 0.0
    band: Band = Band.INTERACTIVE
    """As asked for, else that of the job it was launched by, else interactive."""
    choice: int = 0
    """Which of its any-of devices it was given last: 0 is ``spec.demand``, then ``spec.alternatives``."""
    phase: JobPhase = JobPhase.QUEUED
    generation: int = 0
    """Of the attempts there are, or of the next ones while it is queued."""
    oldest: int = 0
    """The first generation whose attempts are still on record."""
    placed_at: float | None = None
    """When this generation was given its machines; None before the first was."""
    started_at: float | None = None
    ended_at: float | None = None
    retries: dict[EndReason, int] = Factory(dict)
    """How often it was made anew, by the cause that ended the generation before; budgets are counted from these."""
    restart_times: tuple[float, ...] = ()
    """When it was made anew on its own account, as far back as its `ActorConfig` counts."""
    restart_streak: int = 0
    """Restarts without a long life between them: each doubles the back-off."""
    first_restart_reason: str = ""
    """Why the first of the restarts that count now was needed."""
    crash_streak: int = 0
    """Failures in a row, each within seconds of its start (see `fray.model.restart_policy`)."""
    held_until: float | None = None
    """While HELD: when its back-off is over."""
    stop_cause: EndReason | None = None
    stop_reason: str = ""
    ended_by: str = ""
    """Who asked for its end."""
    first_outcome: Outcome | None = None
    """While CLOSING: what ended this generation."""
    first_outcome_at: float = 0.0
    first_member: int | None = None
    """Which member broke first, in the generation that is ending or, once the job has ended, in the last one."""
    previous_nodes: tuple[NodeName, ...] = ()
    """Where the members of the generation before were, by member, empty where the machine was at fault: they go there
    again if there is room."""
    checkpoint: StoredCheckpoint | None = None
    preempted_at: tuple[float, ...] = ()
    """When it was ended for the sake of others, as far back as the policy counts."""
    preempted_for: str = ""
    """For whose sake its last generation was ended, or this one is; empty: no generation was."""
    notice_s: float = 0.0
    """While CLOSING: how long its members were given before their ladders begin."""
    outcome: Outcome | None = None
    """Committed exactly once."""
    value_forgotten: bool = False
    """It had a value, which is no longer kept (`Rules.results_limit_bytes`)."""
    is_gathered: bool = False
    """While HELD: it waits for nothing but to be placed with its job group."""
    is_absorbed: bool = False
    """It failed, and its job group did not fail by that."""

    @property
    def job_id(self) -> JobId:
        return self.spec.job_id

    @property
    def is_active(self) -> bool:
        """It has its machines, and nobody has decided its end."""
        return self.phase in (JobPhase.STARTING, JobPhase.RUNNING)

    @property
    def time_limit_at(self) -> float | None:
        """Of one that runs: when its time is over; None: it has no limit."""
        if self.spec.time_limit_s is None or self.placed_at is None:
            return None
        return self.placed_at + self.spec.time_limit_s

    @property
    def ended(self) -> bool:
        return self.phase is JobPhase.ENDED


@define(kw_only=True)
class JobGroupRow:
    """Jobs that are placed together; its members are the jobs that name it."""

    group_id: str
    config: JobGroupConfig
    """With a name."""
    namespace: Namespace
    order: int
    """Before its first job's."""
    launched_by: SessionId = ""
    launched_at: float = 0.0
    queued_at: float = 0.0
    """When the last of its members began to wait for machines."""
    place: str | None = None
    """The region or zone where its members were placed together last; None: they have not been."""
    placed_at: float | None = None
    """When that was first."""
    primaries: int = 0
    auxiliaries: int = 0
    primaries_succeeded: int = 0
    auxiliaries_succeeded: int = 0
    primaries_unsuccessful: int = 0
    """Ended without success."""
    auxiliaries_unsuccessful: int = 0
    auxiliaries_failed: int = 0
    """Of the lost ones, those that nobody has ended."""
    outcome: Outcome | None = None
    """Decided once, by the end of one of its jobs; the others are being ended then."""
    decided_by: JobId = ""
    ended_at: float | None = None
    """When the last of its jobs had ended."""


@define(kw_only=True)
class AttemptRow:
    attempt_id: AttemptId
    job_id: JobId
    generation: int
    member: int
    node: NodeName
    incarnation: str
    """Of the node: another incarnation never held it."""
    devices: tuple[str, ...] = ()
    ports: dict[str, int] = Factory(dict)
    """By name; no other living attempt of the machine has one of them."""
    host: str = ""
    """How peers reach its machine, as it was known when this was placed."""
    phase: AttemptPhase = AttemptPhase.DESIRED
    ran: bool = False
    """Has been seen running (or has succeeded)."""
    ready: bool = False
    """Its actor has registered: it has served, so whatever ends it is no crash at its start."""
    stop_cause: EndReason | None = None
    """Set once the node is asked to end it."""
    pid: int | None = None
    outcome: Outcome | None = None
    placed_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def living(self) -> bool:
        return self.phase is not AttemptPhase.ENDED


@frozen
class TakenPort:
    port: int
    until: float
    """Others are given first until then."""


@frozen(kw_only=True)
class Cordon:
    """By somebody's word nothing new is placed on a machine, and what runs there may have to go (see `drain`)."""

    since: float
    by: str
    reason: str = ""
    drain: bool = False
    """What runs there is ended, to begin elsewhere."""
    until: float | None = None
    """While draining: when those are ended that may end by themselves until then. None: they were asked to end."""
    drained_at: float | None = None
    """Since when nothing is there any more."""
    is_node_leaving: bool = False
    """It is the machine's own word, which is about to end: it goes with this incarnation."""


@frozen(kw_only=True)
class NodeFault:
    """An end of an attempt that speaks against its machine (see `quarantine`)."""

    job_id: JobId
    kind: str
    """Equal for jobs that are alike."""
    description: str
    at: float
    points: int = 1
    is_proven: bool = False
    """One like it has done well elsewhere."""


@frozen(kw_only=True)
class Quarantine:
    """A machine is suspected: nothing new is placed there until its probe, or an operator, says that it is well."""

    since: float
    reason: str
    jobs: tuple[JobId, ...] = ()
    """Whose ends spoke against it."""
    failed_probes: int = 0
    """That have found something."""
    probe_at: float | None = None
    """When the next one is due. None: it is under way, or the machine is silent."""
    probe_sent_at: float | None = None
    probe_message: str = ""
    """What the last one has found."""


@define(kw_only=True)
class Node:
    name: NodeName
    incarnation: str
    boot_id: str
    capacity: Capacity
    host: str = ""
    process: ProcessMark | None = None
    phase: NodePhase = NodePhase.ALIVE
    silent_since: float = 0.0
    has_reported: bool = True
    """It has told what it holds since it connected; nothing new is placed before."""
    stray_attempts: tuple[AttemptId, ...] = ()
    """Living attempts it holds and nobody wants: nothing new is placed until they are gone."""
    serial: int = 0
    """Highest `Report.serial` seen of this incarnation."""
    busy: dict[str, str] = Factory(dict)
    """Accelerators that it says nobody may be given, and who holds them."""
    taken_ports: tuple[TakenPort, ...] = ()
    """Ports that strangers held when they were last tried."""
    is_leaving: bool = False
    """The unit it belongs to is being given back (`units.Unit`): nothing new is placed."""
    log_archive: str = ""
    """Where it copies its logs to, for those who look for them when it is gone."""
    cordon: Cordon | None = None
    faults: tuple[NodeFault, ...] = ()
    """Since a job has done well there, oldest first."""
    quarantine: Quarantine | None = None
    relapses: int = 0
    """Quarantines before this one, each soon after the one before."""
    probe_passed_at: float = 0.0
    """When its last probe found nothing wrong."""

    @property
    def is_schedulable(self) -> bool:
        """Whether new attempts may be placed on it."""
        is_up = self.phase is NodePhase.ALIVE and self.has_reported and not self.stray_attempts
        return is_up and self.cordon is None and self.quarantine is None and not self.is_leaving


@define(kw_only=True)
class Session:
    session: SessionId
    role: Role
    namespace: Namespace
    grace_s: float = 30.0
    attempt_id: AttemptId | None = None
    user: str = ""
    process: ProcessMark | None = None
    """Of the controller's own machine: its death is known, also to the next controller, without any grace."""
    phase: SessionPhase = SessionPhase.OPEN
    lost_at: float = 0.0
    ended_at: float = 0.0
    """When its end was decided."""
    reason: str = ""
    refs: tuple[int, ...] = ()
    """Requests that wait for its end."""

    @property
    def owner(self) -> str:
        """What jobs it launches are owned by."""
        return self.attempt_id or self.session

    @property
    def is_ending(self) -> bool:
        return self.phase in (SessionPhase.CLOSING, SessionPhase.ENDED)


@define(kw_only=True)
class ActorRegistration:
    """A living actor in the registry."""

    endpoint: ActorEndpoint
    session: SessionId
    """Who registered it."""
    exclusive: bool
    order: int


@frozen(kw_only=True)
class ClaimedShare:
    """So many members' worth of one machine."""

    node: NodeName
    demand: Demand
    members: int = 1


@define(kw_only=True)
class CapacityClaim:
    """What is kept for an applicant for whose sake others are being ended (see `preemption`)."""

    applicant: str
    reservation: str = ""
    """Of whose machines; empty: of the fleet's."""
    shares: tuple[ClaimedShare, ...]
    victims: tuple[JobId, ...]
    made_at: float = 0.0


@define(kw_only=True)
class ActorTombstone:
    """Why an actor that was no job of its own is gone."""

    actor_id: ActorId
    outcome: Outcome
    order: int
    name: str = ""
    namespace: Namespace = ""
    ended_at: float = 0.0


@define(kw_only=True)
class JobTombstone:
    """What is kept of a job that ended long ago: enough to know its id again."""

    job_id: JobId
    name: str
    namespace: Namespace
    cause: EndReason
    ended_at: float
    order: int
    message: str = ""
    exit_code: int | None = None
    had_value: bool = False


@define(kw_only=True)
class SchedulerMeta:
    """The one row of table ``law``."""

    now: float = 0.0
    """Seconds since the epoch; never decreases, also over restarts."""
    epoch: int = 0
    last_order: int = 0
    """Last number given to a job, binding or grave."""


@frozen(kw_only=True)
class SchedulerConfig:
    """Limits the law goes by; not stored."""

    suspect_s: float = 30.0
    lease_s: float = 600.0
    starve_s: float = 60.0
    driver_grace_s: float = 30.0
    """How long a driver that is lost without a goodbye may stay away, unless it asked for another time."""
    finished_limit: int = 10_000
    """Ended jobs, sessions and actors on record; of older jobs only a line is kept."""
    finished_keep_s: float = 7 * 86_400.0
    """How long an ended job is on record, at most."""
    results_limit_bytes: int = 4 * 1000**3
    """Results of ended jobs together; those of the oldest are forgotten first, and their jobs stay on record."""
    history_limit: int = 50_000
    """Lines of jobs that ended before: whoever repeats their launch is told so. One older still would run anew."""
    living_limit: int = 100_000
    """Jobs that have not ended; more are refused."""
    depth_limit: int = 64
    """Jobs launched by jobs that were launched by jobs, and so on. Who goes deeper launches himself by mistake, and
    what ends them all goes down through them in one step."""
    records_limit: int = 100
    """Attempts of earlier generations on record for each job."""
    forget_node_s: float = 86_400.0
    """How long a lost node is listed."""
    tenants_limit: int = 10_000
    """Users, and namespaces of users, whose past use is remembered."""
    probe_limit_s: float = 90.0
    """A machine that was asked to probe itself and has not answered by then has found something."""
    quarantine_share: float = 1 / 3
    """Of the machines, that may be in quarantine at a time: a bad job must not take all of them. 0: none ever is."""
    forget_cordoned_s: float = 30 * 86_400.0
    """How long one is that is cordoned: it shall still be so when it comes back from its repair."""


TABLES: dict[str, type] = {
    "meta": SchedulerMeta,
    "node": Node,
    "session": Session,
    "job": JobRow,
    "job_group": JobGroupRow,
    "attempt": AttemptRow,
    "registration": ActorRegistration,
    "actor_tombstone": ActorTombstone,
    "job_tombstone": JobTombstone,
    "usage": Usage,
    "unit": CloudUnit,
    "machine_group": GroupRow,
    "reservation": ReservationRow,
    "claim": CapacityClaim,
}
"""In the order in which `State.restore` can be given the rows (any order will do)."""


def job_state(job: JobRow) -> JobState:
    return FINAL_STATE[job.outcome.cause] if job.outcome else LIVING_STATE[job.phase]


def error_message(outcome: Outcome | None) -> str | None:
    """A finished job's trouble in words; None while it lives and on success."""
    if outcome is None or outcome.cause is EndReason.SUCCEEDED:
        return None
    return outcome.message or outcome.cause.value.replace("_", " ")
