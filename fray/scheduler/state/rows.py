"""Rows of the scheduler: one class per table, plain typed fields only, so that each row is one JSON text in the store.

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
    """Attempt that saved it."""
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
    """Session, attempt or job whose end ends this job; empty when detached."""
    root: SessionId = ""
    """Driver's session at the top of the chain of owners; empty below a detached job."""
    launched_by: SessionId = ""
    parent: JobId = ""
    """Job whose process launched it."""
    launched_at: float = 0.0
    queued_at: float = 0.0
    band: Band = Band.INTERACTIVE
    """Priority band: the requested one, else that of the launching job, else interactive."""
    choice: int = 0
    """Index of the alternative devices it was given last: 0 is ``spec.demand``, then ``spec.alternatives``."""
    phase: JobPhase = JobPhase.QUEUED
    generation: int = 0
    """Generation of its attempts, or of its next attempts while it is queued."""
    oldest: int = 0
    """First generation whose attempts are still on record."""
    placed_at: float | None = None
    """Time at which this generation was given its machines; None before the first placement."""
    started_at: float | None = None
    ended_at: float | None = None
    retries: dict[EndReason, int] = Factory(dict)
    """Retries by the cause that ended the generation before; retry budgets are counted from these."""
    restart_times: tuple[float, ...] = ()
    """Times of restarts by its own actor policy, as far back as its `ActorConfig` counts."""
    restart_streak: int = 0
    """Restarts without a long life between them: each doubles the back-off."""
    first_restart_reason: str = ""
    """Reason of the first restart that still counts."""
    crash_streak: int = 0
    """Failures in a row, each within seconds of its start (see `fray.model.restart_policy`)."""
    held_until: float | None = None
    """End of its back-off while HELD."""
    stop_cause: EndReason | None = None
    stop_reason: str = ""
    ended_by: str = ""
    """Name of the client that requested its end."""
    first_outcome: Outcome | None = None
    """Outcome that ended this generation, while CLOSING."""
    first_outcome_at: float = 0.0
    first_member: int | None = None
    """Member that failed first, in the generation that is ending or, once the job has ended, in the last one."""
    previous_nodes: tuple[NodeName, ...] = ()
    """Nodes of the previous generation by member, empty where the machine was at fault: the preferred nodes of the next
    placement, since caches and files are there."""
    checkpoint: StoredCheckpoint | None = None
    preempted_at: tuple[float, ...] = ()
    """Times at which it was preempted, as far back as the policy counts."""
    preempted_for: str = ""
    """Applicant for which its last generation, or this one, was preempted; empty if none was."""
    requeues: int = 0
    """Retries on request of a person, which no budget pays for."""
    requeued: int | None = None
    """Generation that was ended last by such a request; while it ends, this is the present one."""
    requeued_by: str = ""
    """Client that has requested that, and its reason."""
    notice_s: float = 0.0
    """Notice before the termination of its members begins, while CLOSING."""
    outcome: Outcome | None = None
    """Final outcome, committed exactly once."""
    value_forgotten: bool = False
    """True if its value was dropped to keep within `SchedulerConfig.results_limit_bytes`."""
    is_gathered: bool = False
    """True if it only waits to be placed with its job group, while HELD."""
    is_absorbed: bool = False
    """True if it failed without failing its job group."""

    @property
    def job_id(self) -> JobId:
        return self.spec.job_id

    @property
    def is_requeued(self) -> bool:
        """Return whether its present generation ends because a person has requested it to wait again."""
        return self.requeued == self.generation

    @property
    def is_active(self) -> bool:
        """Return whether it has its machines and its end is not decided."""
        return self.phase in (JobPhase.STARTING, JobPhase.RUNNING)

    @property
    def time_limit_at(self) -> float | None:
        """End of its time limit while it runs; None without a limit."""
        # From the placement and not from the start: others wait for the machines while an environment is being
        # prepared.
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
    """Configuration, with the name filled in."""
    namespace: Namespace
    order: int
    """Order of acceptance, lower than that of its first job."""
    launched_by: SessionId = ""
    launched_at: float = 0.0
    queued_at: float = 0.0
    """Time at which the last of its members began to wait for machines."""
    place: str | None = None
    """Region or zone where its members were placed together last; None before the first placement."""
    placed_at: float | None = None
    """Time of the first placement."""
    primaries: int = 0
    auxiliaries: int = 0
    primaries_succeeded: int = 0
    auxiliaries_succeeded: int = 0
    primaries_unsuccessful: int = 0
    """Primary members that ended without success."""
    auxiliaries_unsuccessful: int = 0
    auxiliaries_failed: int = 0
    """Unsuccessful auxiliary members, without those that were stopped on request."""
    outcome: Outcome | None = None
    """Outcome of the group, decided once by the end of one of its jobs; the other jobs are stopped then."""
    decided_by: JobId = ""
    ended_at: float | None = None
    """Time at which the last of its jobs ended."""


@define(kw_only=True)
class AttemptRow:
    attempt_id: AttemptId
    job_id: JobId
    generation: int
    member: int
    node: NodeName
    incarnation: str
    """Incarnation of the node: another incarnation never held this attempt."""
    devices: tuple[str, ...] = ()
    ports: dict[str, int] = Factory(dict)
    """Ports by name; no other living attempt of the machine has one of them."""
    host: str = ""
    """Address under which peers reach its machine, as of the placement."""
    phase: AttemptPhase = AttemptPhase.DESIRED
    ran: bool = False
    """True if it was seen running (or succeeded)."""
    ready: bool = False
    """True if its actor has registered, so that its end does not count as a crash at the start."""
    lends: bool = False
    """True while its process waits for jobs below it, which may be placed on its CPUs (see `lending`)."""
    loans: dict[AttemptId, int] = Factory(dict)
    """Thousandths of CPUs that it uses of the shares of its ancestors, by lender; it takes so much less of the
    machine."""
    stop_cause: EndReason | None = None
    """Cause of the stop that was requested from the node."""
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
    """Time until which other ports are given first."""


@frozen(kw_only=True)
class Cordon:
    """Instruction to place nothing new on a machine and perhaps to empty it (see `drain`)."""

    since: float
    by: str
    reason: str = ""
    drain: bool = False
    """True if running jobs are stopped, to restart elsewhere."""
    until: float | None = None
    """End of the time in which jobs may finish by themselves during a drain. None if they were stopped at once."""
    drained_at: float | None = None
    """Time since which the machine is empty."""
    is_node_leaving: bool = False
    """True if the machine announced its own end: the cordon goes with this incarnation."""
    of_operator: Cordon | None = None
    """Cordon of an operator beside that of a leaving machine; it outlives this incarnation."""


@frozen(kw_only=True)
class NodeFault:
    """Failed attempt that counts against its machine (see `quarantine`)."""

    job_id: JobId
    kind: str
    """Key that is equal for jobs that are alike."""
    description: str
    at: float
    points: int = 1
    is_proven: bool = False
    """True if a job of the same kind has succeeded elsewhere."""


@frozen(kw_only=True)
class Quarantine:
    """Suspicion against a machine: nothing new is placed there until its probe or an operator clears it."""

    since: float
    reason: str
    jobs: tuple[JobId, ...] = ()
    """Jobs whose faults led to it."""
    failed_probes: int = 0
    """Number of probes that found a fault."""
    probe_at: float | None = None
    """Time of the next probe. None while one is under way, or while the machine is silent."""
    probe_sent_at: float | None = None
    probe_message: str = ""
    """Findings of the last probe."""


@define(kw_only=True)
class Node:
    name: NodeName
    incarnation: str
    boot_id: str
    capacity: Capacity
    host: str = ""
    joined_at: float = 0.0
    """Time at which this incarnation joined; 0: before a release that records it."""
    process: ProcessMark | None = None
    phase: NodePhase = NodePhase.ALIVE
    silent_since: float = 0.0
    has_reported: bool = True
    """True if it has reported its attempts since it connected; nothing new is placed before."""
    stray_attempts: tuple[AttemptId, ...] = ()
    """Living attempts it holds that should not exist: nothing new is placed until they are gone."""
    serial: int = 0
    """Not used: a field of a row stays, for the release before."""
    busy: dict[str, str] = Factory(dict)
    """Accelerators that its node reports as not available, and what holds them."""
    taken_ports: tuple[TakenPort, ...] = ()
    """Ports that foreign processes held when they were last tried."""
    is_leaving: bool = False
    """True if its unit is being returned to the provider (`CloudUnit`): nothing new is placed."""
    log_archive: str = ""
    """Location it archives its logs to, for readers after its end."""
    cordon: Cordon | None = None
    faults: tuple[NodeFault, ...] = ()
    """Faults since a job last succeeded there, oldest first."""
    quarantine: Quarantine | None = None
    relapses: int = 0
    """Earlier quarantines, each soon after the one before."""
    probe_passed_at: float = 0.0
    """Time at which its last probe found no fault."""

    @property
    def operator_cordon(self) -> Cordon | None:
        """Return the cordon that an operator has set, also while the node is leaving."""
        return self.cordon.of_operator if self.cordon is not None and self.cordon.is_node_leaving else self.cordon

    @property
    def is_schedulable(self) -> bool:
        """Return whether new attempts may be placed on it."""
        # A node with strays, or that has not reported yet, may hold devices that the pool counts as free.
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
    """Process on the controller's own machine: its death is noticed at once, also by the next controller."""
    phase: SessionPhase = SessionPhase.OPEN
    lost_at: float = 0.0
    ended_at: float = 0.0
    """Time at which its end was decided."""
    reason: str = ""
    refs: tuple[int, ...] = ()
    """Requests that wait for its end."""

    @property
    def owner(self) -> str:
        """Owner of the jobs it launches."""
        # A job's process owns by its attempt, so that its jobs survive a lost connection of that process.
        return self.attempt_id or self.session

    @property
    def is_ending(self) -> bool:
        return self.phase in (SessionPhase.CLOSING, SessionPhase.ENDED)


@define(kw_only=True)
class ActorRegistration:
    """A living actor in the registry."""

    endpoint: ActorEndpoint
    session: SessionId
    """Session that registered it."""
    exclusive: bool
    order: int


@frozen(kw_only=True)
class ClaimedShare:
    """Demand of some members on one machine."""

    node: NodeName
    demand: Demand
    members: int = 1


@define(kw_only=True)
class CapacityClaim:
    """Machines held for an applicant for which other jobs are being preempted (see `preemption`)."""

    applicant: str
    reservation: str = ""
    """Reservation whose machines are claimed; empty for the cluster's."""
    shares: tuple[ClaimedShare, ...]
    victims: tuple[JobId, ...]
    made_at: float = 0.0


@define(kw_only=True)
class ActorTombstone:
    """Outcome of a dead actor that shared its process with others."""

    actor_id: ActorId
    outcome: Outcome
    order: int
    name: str = ""
    namespace: Namespace = ""
    ended_at: float = 0.0


@define(kw_only=True)
class JobTombstone:
    """Summary of a job that ended long ago, enough to recognize its id."""

    job_id: JobId
    name: str
    namespace: Namespace
    cause: EndReason
    ended_at: float
    order: int
    message: str = ""
    exit_code: int | None = None
    had_value: bool = False
    user: str = ""


@define(kw_only=True)
class SchedulerMeta:
    """The only row of table ``meta``."""

    now: float = 0.0
    """Clock, seconds since the epoch; never decreases, also over restarts."""
    epoch: int = 0
    last_order: int = 0
    """Last number given to a job, registration or tombstone."""
    first_generation: int = 0
    """Generation of the first attempts of new jobs, and at least that of each restart; above 0 in a store that was made
    from a backup (see `fray.scheduler.jobs.retention.skip_generations`)."""


@frozen(kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler; not stored."""

    suspect_s: float = 30.0
    lease_s: float = 600.0
    starve_s: float = 60.0
    driver_grace_s: float = 30.0
    """Seconds for which a lost driver may be away, unless it requested another time."""
    finished_limit: int = 10_000
    """Ended jobs, sessions and actors on record; of older jobs only a summary remains."""
    finished_keep_s: float = 7 * 86_400.0
    """Maximum time for which an ended job is on record."""
    results_limit_bytes: int = 20 * 1000**3
    """Total size of the results of ended jobs; the oldest results are dropped first, and their jobs stay on record."""
    history_limit: int = 50_000
    """Summaries of ended jobs, by which a repeated launch is recognized. An even older job would run again."""
    living_limit: int = 100_000
    """Jobs that have not ended; launches beyond it are refused."""
    depth_limit: int = 64
    """Depth of jobs that launch jobs. A job this deep launches itself by mistake, and when the first job ends, all of
    them end in one step."""
    records_limit: int = 100
    """Attempts of earlier generations on record for each job."""
    forget_node_s: float = 86_400.0
    """Seconds for which a lost node is listed."""
    tenants_limit: int = 10_000
    """Users, and namespaces of users, whose past usage is remembered."""
    probe_limit_s: float = 90.0
    """Seconds after which a probe without an answer counts as failed."""
    quarantine_share: float = 1 / 3
    """Part of the machines that may be in quarantine at a time: a bad job must not take all of them. 0 disables it."""
    forget_cordoned_s: float = 30 * 86_400.0
    """The same for a cordoned node: it must still be cordoned when it comes back from its repair."""


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
"""Classes of the rows by table."""


def job_state(job: JobRow) -> JobState:
    return FINAL_STATE[job.outcome.cause] if job.outcome else LIVING_STATE[job.phase]


def error_message(outcome: Outcome | None) -> str | None:
    """Return the failure of a finished job; None while it lives and on success."""
    if outcome is None or outcome.cause is EndReason.SUCCEEDED:
        return None
    return outcome.message or outcome.cause.value.replace("_", " ")
