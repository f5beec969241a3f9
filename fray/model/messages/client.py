"""Messages between a driver or job and the controller.

Requests carry ids made by their author and may be repeated; each repetition is answered, and it takes effect once.
Notices go to subscribers. A pickled value is sent beside its message as an attachment, named by the SHA-256 in the
message.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, field

from fray.model.actors import ActorInfo
from fray.model.frozen import frozen
from fray.model.ids import ActorId, AttemptId, BlobId, JobId, Namespace, NodeName, SessionId
from fray.model.job_groups import JobGroupInfo, JobGroupSpec
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.reservations import ReservationId, ReservationInfo, ReservationSpec
from fray.model.specs import JobInfo, JobSpec, JobState, Outcome


class Role(StrEnum):
    DRIVER = "driver"
    JOB = "job"
    TOOL = "tool"
    """Command line tool: owns nothing."""


@frozen(kw_only=True)
class ProcessMark:
    """Unique identity of a process, so that a peer on the same machine can prove its death."""

    boot_id: str
    pid: int
    start_ticks: int


@frozen(kw_only=True)
class ClientHello:
    """Greeting of a driver or job to the controller (inside `fray.net`'s hello)."""

    session: SessionId
    role: Role
    attempt_id: AttemptId | None = None
    namespace: Namespace | None = None
    """Namespace requested by a driver; None: the controller generates a unique one."""
    grace_s: float | None = None
    """Grace period: seconds that everything this driver owns survives a lost connection. None: the controller's
    default."""
    process: ProcessMark | None = None
    user: str = ""
    established: bool = False
    """Set once the controller has accepted a request of this session: without a record, it has lost the session."""
    leaving: bool = False
    """Set after goodbye, when the session reconnects to learn that everything has ended."""


@frozen(kw_only=True)
class ControllerHello:
    """Greeting of the controller, with the identity of its cluster and its epoch."""

    cluster_id: str
    epoch: int
    """Grows by one at each start of the controller on its store."""
    namespace: Namespace = ""
    session_known: bool = False
    """The session existed before this connection."""
    user: str = ""
    """User of the session, as its key says; empty: as the client says."""
    in_place: bool = False
    """Jobs run in the process of their author, where its files are: no workspace needs to be sent."""
    env_vars: dict[str, str] = Factory(dict)
    """Variables of every job of the cluster; sent to nodes."""
    version: str = ""
    """Version of Fray."""
    now: float = 0.0
    """Time of its clock, seconds since the epoch."""


# Jobs


@frozen(kw_only=True)
class Launch:
    """Launch jobs, all or none. Repeating it with the same job ids attaches to the first. Reply: `Jobs`, in order.

    The reply for a single actor with ``get_if_exists`` may be a living actor of that name: nothing was launched then.
    Likewise for each job with ``adopt_existing``; if a living job of that name has another request: NameInUse.

    Errors: NameInUse, NeverSchedulable, InvalidRequest. Attachments: the payloads.
    The sender is subscribed to `JobChanged` of what it launches.
    """

    jobs: tuple[JobSpec, ...]
    secrets: dict[str, str] = field(factory=dict, repr=False)
    """Values sent by the author, by name of the secret. They are in no spec; the controller has them only in memory."""
    group: JobGroupSpec | None = None
    """All the jobs are the members of this new group."""
    on_behalf_of: str = ""
    """User of the jobs, if it is another one than the sender's. Error: Unauthorized, unless the policy grants it."""


@frozen(kw_only=True)
class ProvideSecrets:
    """Send secrets again after a restart of the controller: by job, and by name. Reply: `Done`."""

    secrets: dict[JobId, dict[str, str]] = field(repr=False)


@frozen(kw_only=True)
class Terminate:
    """End jobs and everything they own; ended and unknown ones are ignored. Reply: `TerminateResult`, at once."""

    jobs: tuple[JobId, ...] = ()
    reason: str = "terminated on request"
    name: str = ""
    """Also the living job of this name."""
    prefix: str = ""
    """Also all living jobs whose names begin with this prefix."""
    namespace: Namespace | None = None
    """Namespace in which names are looked up. None: the caller's, and detached jobs with their own; ``"*"``: all."""
    tree: bool = False
    """Also all jobs that these have launched, at any depth, including detached ones."""
    own: bool = False
    """Only jobs that the sender has launched."""
    group: str = ""
    """Also all members of the living job group of this name or id."""


@frozen(kw_only=True)
class TerminateResult:
    """Jobs whose end this request has caused; others were being ended already, or had ended."""

    jobs: tuple[JobId, ...]


@frozen(kw_only=True)
class Requeue:
    """End running jobs, which wait again and spend none of their retries. Reply: `RequeueResult`, at once."""

    generations: dict[JobId, int]
    """Generation that is meant, by job: a repeated request has no second effect."""
    reason: str = "requeued on request"  # the default of drivers of an earlier build


@frozen(kw_only=True)
class RequeueResult:
    """Answer to a request to requeue jobs.

    Attributes:
        jobs: ids of those that wait again, or will when their attempts have ended.
        refused: id of each other one, and why it was not requeued.
    """

    jobs: tuple[JobId, ...] = ()
    refused: dict[JobId, str] = field(factory=dict)


@frozen(kw_only=True)
class FindJob:
    """Find a job. Reply: `Jobs`: the living job of this name, else the last that ended, else that of this id.

    ``namespace``: as in `Terminate`. The sender is subscribed to it as if it had launched it.
    """

    name: str
    namespace: Namespace | None = None


@frozen(kw_only=True)
class WatchJobs:
    """Subscribe to `JobChanged` of these jobs. Reply: `Jobs`, as they are now, values attached. Error:
    NoSuchJob."""

    jobs: tuple[JobId, ...]


@frozen(kw_only=True)
class ListJobs:
    """List jobs. Reply: `Jobs`, newest last, without values. ``namespace=None``: the caller's own, ``"*"``: all."""

    namespace: Namespace | None = None
    name: str = ""
    """Only jobs of exactly this name."""
    prefix: str = ""
    """Only jobs whose names (or ids) begin with this prefix."""
    states: tuple[JobState, ...] = ()
    """Only jobs in one of these states; empty: in any."""
    limit: int = 0
    """Maximum number, newest first; 0: all."""
    jobs: tuple[JobId, ...] = ()
    """Only those of these that are on record; empty: any."""
    changed_since: int | None = None
    """Only jobs that have changed after this `Jobs.change`, at most ``limit``, those that changed first come first; 0:
    all. Progress and the reasons of waiting jobs change without it."""
    wait_s: float = 0.0
    """Seconds for which the answer is held back, with ``changed_since``, while there is no change."""


@frozen(kw_only=True)
class Jobs:
    jobs: tuple[JobInfo, ...]
    warnings: tuple[str, ...] = ()
    """Warnings about jobs that a launch has made, for its author."""
    change: int = 0
    """Number of the last change in this reply, for ``changed_since``; 0 from a controller of an earlier release, which
    has sent all."""
    has_more: bool = False
    """There are further changes after that."""
    is_reset: bool = False
    """The number asked for is of another epoch or too old: what the client has is to be dropped."""
    forgotten: tuple[JobId, ...] = ()
    """Jobs that are no longer on record since then."""


@frozen(kw_only=True)
class ListGroups:
    """List job groups. Reply: `JobGroups`, newest last. ``namespace`` as in `ListJobs`."""

    namespace: Namespace | None = None
    name: str = ""
    """Only groups of this name or id."""


@frozen(kw_only=True)
class JobGroups:
    groups: tuple[JobGroupInfo, ...]


@frozen(kw_only=True)
class JobChanged:
    """Notice: state of a job that the receiver launched or watches. The value of an ended job is attached."""

    job: JobInfo


@frozen(kw_only=True)
class JobMeasured:
    """Notice: metrics of a job that the receiver launched or watches, at most twice a second. The times in ``metrics``
    are absolute (seconds since the epoch); attempts without changes may be missing."""

    job_id: JobId
    metrics: tuple[AttemptMetrics, ...]


@frozen(kw_only=True)
class GetStacks:
    """Capture the stacks of a job's processes. Reply: `Stacks`, in bounded time. Errors: NoSuchJob, ChannelFull."""

    job: JobId


@frozen(kw_only=True)
class Stacks:
    """Stacks of all threads of each living attempt, or a line in brackets that says why there are none."""

    stacks: dict[AttemptId, str]


@frozen(kw_only=True)
class FetchBlob:
    """Fetch a blob. Reply: `Done` with the content attached. Error: InvalidRequest: unknown blob."""

    blob: BlobId


@frozen(kw_only=True)
class Explain:
    """Explain the job's current state. Reply: `Text`. Error: NoSuchJob."""

    job: JobId


@frozen(kw_only=True)
class GetEvents:
    """Get the job's events, in order. Reply: `Events`. Error: NoSuchJob."""

    job: JobId


@frozen(kw_only=True)
class Event:
    """One line of the event log."""

    time: float
    job: JobId
    what: str
    """Type of the event, such as ``launched``, ``placed``, ``running``, ``ended``."""
    text: str = ""


@frozen(kw_only=True)
class Events:
    events: tuple[Event, ...]


@frozen(kw_only=True)
class GetJobSpec:
    """Get what a job requests. Reply: `RequestedJob`. Error: NoSuchJob, also if only a summary of it is left."""

    job: JobId


@frozen(kw_only=True)
class RequestedJob:
    spec: JobSpec
    """Spec without code, arguments, variables, secrets, environment and addresses; its band is the one in force."""


@frozen(kw_only=True)
class Text:
    text: str


@frozen(kw_only=True)
class Done:
    pass


# Logs


@frozen(kw_only=True)
class FollowLogs:
    """Send `LogLines` of this job (``job=None``: of every job this session owns, at any depth). Reply: `Done`.

    Live output for a terminal: a slow reader skips lines. For complete logs use `ReadLog`.
    """

    job: JobId | None = None
    on: bool = True


@frozen(kw_only=True)
class LogLines:
    """Notice: lines that an attempt wrote, in order. Attached: records (`fray.model.log_records`) from ``first`` on."""

    job_id: JobId
    name: str
    attempt_id: AttemptId
    first: int
    """Lines before this number in the records were sent before."""
    end: int
    skipped: int = 0
    """Number of lines before ``first`` that are not sent."""
    launched_job: JobId = ""
    """Job that the session itself has launched: this one, or the one below which it runs."""


@frozen(kw_only=True)
class WatchLogs:
    """Get the attempts that have logs. Reply: `LogSources`, as they are now. Error: NoSuchJob.

    With ``follow``, `LogAppended` notifies of new lines, until the same is sent with ``follow=False``.
    """

    job: JobId
    tree: bool = False
    """Also of all jobs launched by it, at any depth, whether they are alive or not."""
    follow: bool = False


@frozen(kw_only=True)
class LogSource:
    """One attempt whose log can be read (`fray.model.messages.node.ReadLog`)."""

    attempt_id: AttemptId
    job_id: JobId
    name: str
    ended: bool = False


@frozen(kw_only=True)
class LogSources:
    sources: tuple[LogSource, ...] = ()
    """Sources in the order in which their jobs were launched; attempts of one job in order."""
    ended: bool = False
    """Set once the job and all its attempts have ended."""


@frozen(kw_only=True)
class LogAppended:
    """Notice to watchers: an attempt has new lines. Not repeated before its log was read."""

    source: LogSource


# Reservations


@frozen(kw_only=True)
class CreateReservation:
    """Hold machines. Repeating it with the same id attaches to the first. Reply: `Reservations`, of this one.

    Errors: InvalidRequest, NeverSchedulable. The sender watches what it creates.
    """

    spec: ReservationSpec


@frozen(kw_only=True)
class RenewReservation:
    """Restart a reservation's time to live. Reply: `Reservations`. Error: NoSuchReservation (also after its end)."""

    reservation_id: ReservationId
    ttl_s: float | None = None
    """New time to live; None: as before."""


@frozen(kw_only=True)
class ReleaseReservation:
    """End a reservation and the jobs in it. Reply: `Done`, at once, also if it has ended. Error: NoSuchReservation."""

    reservation_id: ReservationId
    reason: str = "released"


@frozen(kw_only=True)
class WatchReservation:
    """Subscribe to `ReservationChanged`. Reply: `Reservations`, as it is now. Error: NoSuchReservation."""

    reservation_id: ReservationId
    follow: bool = True
    """False: only get the state, or unsubscribe."""


@frozen(kw_only=True)
class ListReservations:
    """List reservations. Reply: `Reservations`, oldest first. ``namespace=None``: the caller's own, ``"*"``: all."""

    namespace: Namespace | None = None
    ended: bool = False
    """Include ended ones."""


@frozen(kw_only=True)
class Reservations:
    reservations: tuple[ReservationInfo, ...]


@frozen(kw_only=True)
class ReservationChanged:
    """Notice: state of a reservation that the receiver watches."""

    reservation: ReservationInfo


# Names


@frozen(kw_only=True)
class ActorEndpoint:
    """Address of one living actor, with its incarnation."""

    actor_id: ActorId
    name: str
    job_id: JobId
    namespace: Namespace
    metadata: dict[str, str] = Factory(dict)
    incarnation: str = ""
    """The attempt id of its process; for an actor in a driver, the driver's session id."""
    number: int = 0
    """Number of the actor on its host: the ``target`` of call frames."""
    addresses: tuple[str, ...] = ()
    """Addresses in order of preference."""
    key: str = field(default="", repr=False)
    """Credential that proves to the host that the caller may dial it."""


@frozen(kw_only=True)
class Register:
    """Bind an actor of the sender's process to a name. Reply: `Done`. Errors: NameInUse (if ``exclusive``).

    Repeating it with the same actor id replaces metadata and addresses. Ends with the process, or by `Unregister`.
    """

    endpoint: ActorEndpoint
    exclusive: bool = False


@frozen(kw_only=True)
class Unregister:
    actor_id: ActorId


@frozen(kw_only=True)
class Watch:
    """Subscribe to `Names` of a key. Reply: `Names` as it is now.

    ``key`` is ``name:{namespace}/{name}`` (any number of actors) or ``actor:{actor_id}`` (one; its end is reported).
    """

    key: str


@frozen(kw_only=True)
class Unwatch:
    key: str


@frozen(kw_only=True)
class Names:
    """Reply and notice: all endpoints under a key, oldest first. Always the whole set."""

    key: str
    endpoints: tuple[ActorEndpoint, ...]
    ended: Outcome | None = None
    """Outcome, for ``actor:`` keys, of an actor that is not available (again). Its error is attached if it has one."""
    may_return: bool = False
    """Set if ``ended`` is not final: its machine is silent and may come back, or the actor is restarting elsewhere."""


@frozen(kw_only=True)
class ListActors:
    """List the living actors of a namespace whose names start with ``prefix``. Reply: `Actors`, oldest first.

    ``namespace=None``: the caller's own, ``"*"``: all.
    """

    prefix: str = ""
    namespace: Namespace | None = None
    ended: bool = False
    """Also the last 1,000 that have ended and are on record, before those that live. A controller of an earlier release
    lists those that live."""


@frozen(kw_only=True)
class FindActor:
    """Find actors by id or name. Reply: `Actors`: living ones first, then the last that ended."""

    actor_id: ActorId = ""
    name: str = ""
    namespace: Namespace | None = None


@frozen(kw_only=True)
class Actors:
    actors: tuple[ActorInfo, ...]


# Checkpoints


@frozen(kw_only=True)
class SaveCheckpoint:
    """Store the state of the sender's actor, replacing the previous one, until its job ends. Reply: `Done`, once saved.

    Attachment: the pickled state, unless ``location`` gives its address in a storage. A checkpoint from an ended
    incarnation is refused (ActorDied); a checkpoint with a lower ``number`` than the stored one, or of an actor that is
    being ended for good, is answered but not stored.
    """

    number: int
    """Sequence number within this incarnation."""
    blob: BlobId | None = None
    location: str = ""


@frozen(kw_only=True)
class FetchCheckpoint:
    """Fetch the sender's checkpoint. Reply: `Checkpoint`, content attached if it is stored there. Error: ActorDied."""


@frozen(kw_only=True)
class Checkpoint:
    """Stored state of an actor; neither ``blob`` nor ``location``: none."""

    blob: BlobId | None = None
    location: str = ""


# Waits


@frozen(kw_only=True)
class ReportWait:
    """Report whether the sender, the process of a job, waits for jobs that it launched: these may use its CPUs then.

    Reply: `Done`. Drivers have no CPUs to lend; their reports have no effect.
    """

    waiting: bool


# The cluster


@frozen(kw_only=True)
class CreateJoinToken:
    """Create a join token for a new machine (`fray.model.join_tokens`); not for jobs. Reply: `JoinTokenCreated`."""

    machine: str
    hosts: int = 1
    life_s: float = 3600.0


@frozen(kw_only=True)
class JoinTokenCreated:
    token: str = field(repr=False)


@frozen(kw_only=True)
class ListNodes:
    """List the nodes. Reply: `Nodes`."""

    changed_since: int | None = None
    """Only nodes that have changed after this `Nodes.change`; 0: all."""
    wait_s: float = 0.0
    """Seconds for which the answer is held back, as in `ListJobs`."""


@frozen(kw_only=True)
class NodeInfo:
    name: str
    alive: bool
    cpu_milli: int
    cpu_milli_free: int
    memory_bytes: int
    memory_bytes_free: int
    devices: tuple[str, ...] = ()
    attributes: dict[str, str] = Factory(dict)
    attempts: int = 0
    pid: int | None = None
    host: str = ""
    """Host or IP under which peers reach it."""
    ports: str = ""
    """Ports it offers to jobs: ``20032-20543``."""
    ports_free: int = 0
    busy: dict[str, str] = Factory(dict)
    """Accelerators that are not available now, and the process that holds each."""
    granted: dict[str, str] = Factory(dict)
    """Allocated accelerators, and the attempt that has each."""
    standing: str = ""
    """``cordoned``, ``draining``, ``drained``, ``leaving`` or ``quarantined``: nothing new is placed there. Empty: it
    is in service."""
    standing_reason: str = ""
    """Reason for being out of service, prefixed with the user or component that took it out."""
    details: dict[str, str] = Factory(dict)
    """Further details for display, by topic: ``isolation``, ``memory limit``, ``environments``, ``zygotes``, ``logs``,
    ``python``; empty before the node has reported."""
    joined_at: float = 0.0
    """Time at which its process joined, in seconds since the epoch; 0: unknown."""


@frozen(kw_only=True)
class Nodes:
    nodes: tuple[NodeInfo, ...]
    change: int = 0
    """Number of the last change in this reply, for ``changed_since``; 0 if that was not asked for, and from a
    controller of an earlier release, which has sent all."""
    is_reset: bool = False
    """The number asked for is unknown, as in `Jobs`: what the client has is to be dropped."""
    gone: tuple[NodeName, ...] = ()
    """Nodes that have left since then."""


@frozen(kw_only=True)
class EndSession:
    """End the session and everything it owns. Reply: `Done` once all of it has ended."""

    reason: str = "driver left"
