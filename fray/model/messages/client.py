"""Driver (or job) with controller.

Requests carry ids made by their author and may be repeated; the controller answers each once per repetition and it
takes effect once. Notices go to whoever subscribed. A pickled value travels beside its message as an attachment,
named by the SHA-256 that stands in the message.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, field

from fray.model.actors import ActorInfo
from fray.model.frozen import frozen
from fray.model.ids import ActorId, AttemptId, BlobId, JobId, Namespace, SessionId
from fray.model.job_groups import JobGroupInfo, JobGroupSpec
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.reservations import ReservationId, ReservationInfo, ReservationSpec
from fray.model.specs import JobInfo, JobSpec, JobState, Outcome


class Role(StrEnum):
    DRIVER = "driver"
    JOB = "job"
    TOOL = "tool"
    """Command line: owns nothing, looks on."""


@frozen(kw_only=True)
class ProcessMark:
    """Tells one process from every other, ever: proof of death for a peer on the same machine."""

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
    """Asked for by a driver; None lets the controller make a unique one."""
    grace_s: float | None = None
    """How long what this driver owns outlives a loss of connection without goodbye. None: the controller's default."""
    process: ProcessMark | None = None
    user: str = ""
    established: bool = False
    """The controller has accepted something of this session: one that does not know it has forgotten it."""
    leaving: bool = False
    """It has said goodbye, and comes back to hear that all has ended."""


@frozen(kw_only=True)
class ControllerHello:
    """Greeting of the controller: which life of which cluster this is."""

    cluster_id: str
    epoch: int
    """Grows by one at each start of the controller on its store."""
    namespace: Namespace = ""
    session_known: bool = False
    """The session existed before this connection."""
    in_place: bool = False
    """Jobs run in the process of their author, where its files are: no workspace needs to travel."""
    env_vars: dict[str, str] = Factory(dict)
    """To nodes: variables of every job of the cluster."""


# Jobs


@frozen(kw_only=True)
class Launch:
    """Launch jobs, all or none. Repeating it with the same job ids attaches to the first. Reply: `Jobs`, in order.

    A single actor with ``get_if_exists`` may be answered with another one that has its name: nothing was launched then.
    So may each job with ``adopt_existing``; one of another request has its name then: NameInUse.

    Errors: NameInUse, NeverSchedulable, InvalidRequest. Attachments: the payloads.
    The sender is subscribed to `JobChanged` of what it launches.
    """

    jobs: tuple[JobSpec, ...]
    secrets: dict[str, str] = field(factory=dict, repr=False)
    """Values that the author knows, by name of the secret. They are in no spec; the controller keeps them in memory."""
    group: JobGroupSpec | None = None
    """All the jobs are the members of this new group."""


@frozen(kw_only=True)
class ProvideSecrets:
    """The same again, after the controller was restarted: by job, and by name. Reply: `Done`."""

    secrets: dict[JobId, dict[str, str]] = field(repr=False)


@frozen(kw_only=True)
class Terminate:
    """End jobs and everything they own. Ended and unknown ones are left alone. Reply: `Ended`, at once."""

    jobs: tuple[JobId, ...] = ()
    reason: str = "terminated on request"
    name: str = ""
    """The living one of this name, too."""
    prefix: str = ""
    """All living ones whose names begin so, too."""
    namespace: Namespace | None = None
    """Where names are looked for. None: in the caller's, and among detached jobs that have their own; ``"*"``: all."""
    tree: bool = False
    """And all that these have launched, at any depth, the detached ones too."""
    own: bool = False
    """Only those that the sender has launched."""
    group: str = ""
    """All members of the living job group of this name or id, too."""


@frozen(kw_only=True)
class TerminateResult:
    """Those whose end the request has asked for; others were being ended already, or had ended."""

    jobs: tuple[JobId, ...]


@frozen(kw_only=True)
class FindJob:
    """Reply: `Jobs`: the living one of this name, else the last that ended, else that of this id, else none.

    ``namespace``: as in `Terminate`. The sender follows it as if it had launched it.
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
    """Reply: `Jobs`, newest last, without values. ``namespace=None`` means the caller's own, ``"*"`` all."""

    namespace: Namespace | None = None
    name: str = ""
    """Only those of exactly this name."""
    prefix: str = ""
    """Only those whose names (or ids) start so."""
    states: tuple[JobState, ...] = ()
    """Only those in one of these; none: in any."""
    limit: int = 0
    """Only so many of the newest; 0: all."""


@frozen(kw_only=True)
class Jobs:
    jobs: tuple[JobInfo, ...]


@frozen(kw_only=True)
class ListGroups:
    """Reply: `JobGroups`, newest last. ``namespace`` as in `ListJobs`."""

    namespace: Namespace | None = None
    name: str = ""
    """Only those of this name or id."""


@frozen(kw_only=True)
class JobGroups:
    groups: tuple[JobGroupInfo, ...]


@frozen(kw_only=True)
class JobChanged:
    """Notice: the state of a job you launched or watch. The value of an ended job is attached."""

    job: JobInfo


@frozen(kw_only=True)
class JobMeasured:
    """Notice: what is measured of a job that you launched or watch, at most twice a second. The times in ``vitals`` are
    final (seconds since the epoch); attempts that have not moved may be missing."""

    job_id: JobId
    metrics: tuple[AttemptMetrics, ...]


@frozen(kw_only=True)
class GetStacks:
    """Look into the living processes of a job. Reply: `Stacks`, in bounded time. Errors: NoSuchJob, ChannelFull."""

    job: JobId


@frozen(kw_only=True)
class Stacks:
    """Of each living attempt the stacks of all its threads, or a line in brackets that says why there are none."""

    stacks: dict[AttemptId, str]


@frozen(kw_only=True)
class FetchBlob:
    """Reply: `Done` with the content attached. Error: InvalidRequest when unknown."""

    blob: BlobId


@frozen(kw_only=True)
class Explain:
    """Why the job is in the state it is in. Reply: `Text`. Error: NoSuchJob."""

    job: JobId


@frozen(kw_only=True)
class GetEvents:
    """What happened to the job, in order. Reply: `Events`. Error: NoSuchJob."""

    job: JobId


@frozen(kw_only=True)
class Event:
    """One line of the event log."""

    time: float
    job: JobId
    what: str
    """A word such as ``launched``, ``placed``, ``running``, ``ended``."""
    text: str = ""


@frozen(kw_only=True)
class Events:
    events: tuple[Event, ...]


@frozen(kw_only=True)
class Text:
    text: str


@frozen(kw_only=True)
class Done:
    pass


# Logs


@frozen(kw_only=True)
class FollowLogs:
    """Send `LogLines` of this job (``job=None``: of every job this session owns, direct or below). Reply: `Done`.

    As they come by, for a terminal: a reader that is behind skips some. For all of them use `ReadLog`.
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
    """Lines before this in the records are known already."""
    end: int
    skipped: int = 0
    """Lines before ``first`` that are not told here."""


@frozen(kw_only=True)
class WatchLogs:
    """Which attempts have logs. Reply: `LogSources`, as they are now. Error: NoSuchJob.

    With ``follow``, `LogAppended` tells of what is new, until the same is sent with ``follow=False``.
    """

    job: JobId
    tree: bool = False
    """Also of all jobs below it, whether they live or not."""
    follow: bool = False


@frozen(kw_only=True)
class LogSource:
    """One attempt whose log can be asked for (`fray.model.messages.node.ReadLog`)."""

    attempt_id: AttemptId
    job_id: JobId
    name: str
    ended: bool = False


@frozen(kw_only=True)
class LogSources:
    sources: tuple[LogSource, ...] = ()
    """In the order in which their jobs were launched; attempts of one job in theirs."""
    ended: bool = False
    """The job has ended, and so have all attempts."""


@frozen(kw_only=True)
class LogAppended:
    """Notice to who watches: this attempt has printed. Not told again before its log was asked for."""

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
    """Its time to live begins anew. Reply: `Reservations`. Errors: NoSuchReservation (also when it is over)."""

    reservation_id: ReservationId
    ttl_s: float | None = None
    """From now on; None: as before."""


@frozen(kw_only=True)
class ReleaseReservation:
    """End it and what runs in it. Reply: `Done`, at once, also when it is over already. Error: NoSuchReservation."""

    reservation_id: ReservationId
    reason: str = "released"


@frozen(kw_only=True)
class WatchReservation:
    """Subscribe to `ReservationChanged`. Reply: `Reservations`, as it is now. Error: NoSuchReservation."""

    reservation_id: ReservationId
    follow: bool = True
    """False: only look, or stop."""


@frozen(kw_only=True)
class ListReservations:
    """Reply: `Reservations`, oldest first. ``namespace=None`` means the caller's own, ``"*"`` all."""

    namespace: Namespace | None = None
    ended: bool = False
    """Also those that have ended."""


@frozen(kw_only=True)
class Reservations:
    reservations: tuple[ReservationInfo, ...]


@frozen(kw_only=True)
class ReservationChanged:
    """Notice: the state of a reservation you watch."""

    reservation: ReservationInfo


# Names


@frozen(kw_only=True)
class ActorEndpoint:
    """One living actor: where it is and which incarnation it is."""

    actor_id: ActorId
    name: str
    job_id: JobId
    namespace: Namespace
    metadata: dict[str, str] = Factory(dict)
    incarnation: str = ""
    """The attempt id of its process; for an actor in a driver, the driver's session id."""
    number: int = 0
    """Which actor of its host: the ``target`` of call frames."""
    addresses: tuple[str, ...] = ()
    """In order of preference."""
    key: str = field(default="", repr=False)
    """Proves to the host that the caller may dial it."""


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

    ``key`` is ``name:{namespace}/{name}`` (any number of actors) or ``actor:{actor_id}`` (one; its end is told).
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
    """For ``actor:`` keys: the actor will never (again) be there, and why. Its error is attached if it has one."""
    may_return: bool = False
    """``ended`` is not for good: its machine is silent, and it comes back, or the actor is made anew elsewhere."""


@frozen(kw_only=True)
class ListActors:
    """Reply: `Actors`: every living actor of the namespace whose name starts with ``prefix``, oldest first.

    ``namespace=None`` means the caller's own, ``"*"`` all.
    """

    prefix: str = ""
    namespace: Namespace | None = None


@frozen(kw_only=True)
class FindActor:
    """Reply: `Actors`: the one of this id, or those of this name; living ones first, then the last that ended."""

    actor_id: ActorId = ""
    name: str = ""
    namespace: Namespace | None = None


@frozen(kw_only=True)
class Actors:
    actors: tuple[ActorInfo, ...]


# Checkpoints


@frozen(kw_only=True)
class SaveCheckpoint:
    """Keep the state of the sender's actor in place of the one before; gone with its job. Reply: `Done`, once saved.

    Attachment: the pickled state, unless ``location`` says where in a storage it is. One that comes from an incarnation
    that has ended is refused (ActorDied); one with a lower ``number`` than is kept, or of an actor that is being ended
    for good, is answered and not kept.
    """

    number: int
    """Grows with each one of this incarnation."""
    blob: BlobId | None = None
    location: str = ""


@frozen(kw_only=True)
class FetchCheckpoint:
    """Reply: `Checkpoint` of the sender's actor, its content attached if the controller keeps it. Error: ActorDied."""


@frozen(kw_only=True)
class Checkpoint:
    """What is kept of an actor's state; neither ``blob`` nor ``location``: nothing."""

    blob: BlobId | None = None
    location: str = ""


# The cluster


@frozen(kw_only=True)
class CreateJoinToken:
    """A token for a machine that is yet to come (`fray.model.join_tokens`); not for jobs. Reply: `JoinMinted`."""

    machine: str
    hosts: int = 1
    life_s: float = 3600.0


@frozen(kw_only=True)
class JoinTokenCreated:
    token: str = field(repr=False)


@frozen(kw_only=True)
class ListNodes:
    """Reply: `Nodes`."""


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
    """How peers reach it."""
    ports: str = ""
    """``20032-20543``: what it offers to jobs."""
    ports_free: int = 0
    busy: dict[str, str] = Factory(dict)
    """Accelerators that are not given now, and who holds them."""
    granted: dict[str, str] = Factory(dict)
    """Accelerators that attempts have, and which."""
    standing: str = ""
    """``cordoned``, ``draining``, ``drained``, ``leaving`` or ``quarantined``: nothing new is placed there. Empty: it
    is in service."""
    standing_reason: str = ""
    """Who or what has taken it out of service, and why: its name goes before it."""
    details: dict[str, str] = Factory(dict)
    """What it tells people of itself, by what it is about: ``isolation``, ``memory limit``, ``environments``,
    ``zygotes``, ``logs``, ``python``; empty before it has."""


@frozen(kw_only=True)
class Nodes:
    nodes: tuple[NodeInfo, ...]


@frozen(kw_only=True)
class EndSession:
    """Goodbye: end all this session owns. Reply: `Done` once all of it has ended."""

    reason: str = "driver left"
