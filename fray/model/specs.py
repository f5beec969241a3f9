"""Jobs and attempts: what is sent (`JobSpec`, `AttemptSpec`), desired and observed state, and results (`JobInfo`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from attrs import Factory, evolve, field

from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentSpec
from fray.model.frozen import frozen
from fray.model.ids import AttemptId, BlobId, JobId, Namespace, split_attempt
from fray.model.job_groups import JobRole
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.monitoring.health import HealthCheck, OnStall, Progress
from fray.model.monitoring.served_calls import ServedCalls
from fray.model.policy.priority import Band
from fray.model.resources import Demand


class SupervisionStrategy(StrEnum):
    """Members of a supervised group that restart when one of them fails (Erlang's terms)."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"
    """The failed one and those created after it."""


@frozen(kw_only=True)
class ActorConfig:
    """Options of an actor, beyond its class and arguments.

    Attributes:
        max_concurrency: calls running at once. Default: unlimited for a class with an async method, else 1.
        concurrency_groups: name to limit; a method joins a group with ``@fray.method(concurrency_group="io")``.
        max_restarts: how often a failed actor is created again from its arguments; -1: unlimited. Default None: 0,
            unless the API in use has another default.
        restart_period_s: seconds for which a restart counts against ``max_restarts``. Default None: for ever.
        backoff_s: wait before the first restart; doubled with each further one. Default 0.
        backoff_max_s: longest such wait. Default 30.
        kill_after_s: seconds after which a sync call that keeps running despite its cancellation ends the process (the
            actor then restarts as after a failure). Default None: the call is notified, but never killed.
        idle_s: seconds without a call after which the actor ends in order. Default None: never.
        cleanup_s: longest run time of the cleanup hook. Default 5.
        may_overlap: restart as soon as its machine is suspect (silent for 30 s) instead of waiting until that machine
            is proven dead or its lease (600 s) has expired: for a while the old incarnation may still run somewhere.
            Default False.
        checkpoint_every_s: seconds between two calls of its ``__fray_checkpoint__``. Default None: only on demand and
            when it is ended in order.
        health: ``HealthCheck(actor="ping")``: this method is called periodically, in its turn among the other calls;
            an actor that does not answer fails. Default None: healthy while its process runs.
        checkpoint_storage: fsspec address for checkpoints over 8 MiB: ``file:///shared/ckpt``, ``gs://bucket/ckpt``.
            Default None: they are rejected.
        wait_limit_s: seconds of waiting for a machine after which it fails as ``unschedulable``. Default None: never.
        must_start: an error of its first constructor call is final, whatever ``max_restarts`` allows. Default False.
        preemption_notice_s: seconds between the notice of a preemption, or of the drain of its machine
            (`CurrentJob.preempted`), and its termination; calls are served meanwhile. Default 0: at once.

    Raises:
        InvalidRequest: an invalid number.
    """

    max_concurrency: int | None = None
    concurrency_groups: dict[str, int] = Factory(dict)
    max_restarts: int | None = None
    restart_period_s: float | None = None
    backoff_s: float = 0.0
    backoff_max_s: float = 30.0
    kill_after_s: float | None = None
    idle_s: float | None = None
    cleanup_s: float = 5.0
    may_overlap: bool = False
    checkpoint_every_s: float | None = None
    checkpoint_storage: str | None = None
    health: HealthCheck | None = None
    wait_limit_s: float | None = None
    must_start: bool = False
    preemption_notice_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        if self.max_restarts is not None and self.max_restarts < -1:
            raise InvalidRequest(f"max_restarts={self.max_restarts} must be 0 or more, or -1 for always")
        for name in ("restart_period_s", "checkpoint_every_s", "idle_s", "wait_limit_s"):
            amount = getattr(self, name)
            if amount is not None and not amount > 0:
                raise InvalidRequest(f"{name}={amount} must be more than 0 seconds; leave it out for none")
        for name in ("backoff_s", "backoff_max_s", "cleanup_s", "preemption_notice_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest(f"{name}={getattr(self, name)} must be 0 or more seconds")


RESULT_GONE = "it succeeded, and its result is no longer kept"
"""Message in place of a result that has been dropped."""
BLOB_LIMIT_BYTES = 8 * 1024 * 1024
"""Limit of a payload or result that is attached to a message; larger ones are sent in parts (`OfferValue`)."""

# Specifications ------------------------------------------------------------------------------------------------------


class EntryKind(StrEnum):
    CALLABLE = "callable"
    """Payload: pickle of ``(fn, args, kwargs)``."""
    ACTOR = "actor"
    """Payload: pickle of ``(cls, args, kwargs)``; the process hosts the instance until it is asked to end."""
    BINARY = "binary"
    """No payload: ``argv``."""


TERMINATION_LIMIT_S = 24 * 3600.0
"""Longest time of one step of a termination."""


@frozen(kw_only=True)
class TerminationPolicy:
    """Steps of ending a running attempt: cancel, then SIGTERM after ``cancel_s``, then SIGKILL after ``term_s`` more.

    Programs cannot be cancelled: for them it begins with SIGTERM, at once. (Kubernetes: terminationGracePeriod.)

    Attributes:
        cancel_s: seconds from the request to SIGTERM; 0: at once. Default 3.
        term_s: seconds from SIGTERM to SIGKILL; 0: SIGKILL at once. Default 2.

    Raises:
        InvalidRequest: an amount below 0, infinite, or over `TERMINATION_LIMIT_S`.
    """

    cancel_s: float = 3.0
    term_s: float = 2.0

    def __attrs_post_init__(self) -> None:
        for name in ("cancel_s", "term_s"):
            amount = getattr(self, name)
            if (
                isinstance(amount, bool)
                or not isinstance(amount, int | float)
                or not 0 <= amount <= TERMINATION_LIMIT_S
            ):
                raise InvalidRequest(
                    f"TerminationPolicy({name}={amount!r}) must be a number of seconds from 0 "
                    f"to {TERMINATION_LIMIT_S:g}: SIGKILL must be reached"
                )


@frozen(kw_only=True)
class SupervisedGroup:
    """A supervised group that a job is a member of; all its members are launched together."""

    group_id: str
    strategy: SupervisionStrategy
    index: int
    """Position in the order of creation."""


NEEDS_A_JOB = (
    "lifetime='job' needs a job to which the actor can belong: call this in a process of a job; elsewhere use "
    "'non_detached' (ends with its scope) or 'detached' (belongs to the cluster)"
)


@frozen(kw_only=True)
class JobSpec:
    """One job as controller and nodes store it. They never unpickle the payload; the spec holds its hash."""

    job_id: JobId
    name: str
    namespace: Namespace
    entry: EntryKind
    payload: BlobId | None = None
    argv: tuple[str, ...] = ()
    demand: Demand = Factory(Demand)
    members: int = 1
    env_vars: dict[str, str] = Factory(dict)
    sys_path: tuple[str, ...] = ()
    """The author's ``sys.path``; entries that exist on the node are put behind the node's own."""
    cwd: str | None = None
    """The author's working directory, used where it exists; else the attempt's own directory."""
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    detached: bool = False
    owned_by_job: bool = False
    """Owned by the launching job as a whole, and not by the attempt that launched it; for actors."""
    termination: TerminationPolicy = Factory(TerminationPolicy)
    actor: ActorConfig | None = None
    """Options of an actor; None for other jobs."""
    group: str = ""
    """Name of the actor group it is a member of."""
    index: int = 0
    """Position in that group."""
    siblings: SupervisedGroup | None = None
    """Supervised group that its failure affects."""
    get_if_exists: bool = False
    """Return a living actor of this name, if there is one, instead of raising `NameInUse`."""
    adopt_existing: bool = False
    """Return a living job of this name, if it has the same request, instead of raising `NameInUse`."""
    signature: str = ""
    """Digest of what the payload does, to compare requests of different processes (pickles of equal objects may
    differ)."""
    user: str = ""
    """User who submitted it (or the job that launched it)."""
    environment: EnvironmentSpec = Factory(EnvironmentSpec)
    """Environment of its process, beyond what is on the node."""
    secrets: dict[str, str] = Factory(dict)
    """Variable to the name of the secret it holds. Values are in no spec and no store."""
    ports: tuple[str, ...] = ()
    """Names of the ports to allocate."""
    gang: bool = False
    """Members receive their rank and a coordinator, even if there is only one. With several members they always do."""
    health: HealthCheck | None = None
    stall_s: float | None = None
    on_stall: OnStall = OnStall.CAPTURE
    max_retries_machine_loss: int | None = None
    """None: the preemption budget is used."""
    max_retries_out_of_memory: int | None = None
    """None: the failure budget is used."""
    exit_codes: dict[int, ExitRule] = Factory(dict)
    backoff_s: float = 0.0
    backoff_max_s: float = 30.0
    result_storage: str = ""
    """Directory for a result over `BLOB_LIMIT_BYTES`; empty: the controller stores it."""
    memory_limit_bytes: int = 0
    """Memory limit of one member's process tree; 0: no limit."""
    pin_cpus: bool = False
    """Run on exclusive CPUs; the demand is a whole number."""
    alternatives: tuple[Demand, ...] = ()
    """Acceptable replacements of ``demand``, best first; they differ in their devices alone."""
    band: Band | None = None
    """Priority band. None: that of the job that launches it, else interactive."""
    time_limit_s: float | None = None
    """Seconds of run time after which it is ended; None: no limit."""
    notice_s: float = 0.0
    """Seconds between the notice of a preemption and the start of its termination."""
    wait_limit_s: float | None = None
    """Seconds of waiting for machines after which it fails; None: no limit."""
    reservation_id: str = ""
    """Reservation whose machines it uses; empty: those of the fleet."""
    job_group: str = ""
    """Id of the job group with which it is placed; empty: none."""
    role: JobRole | None = None
    """Role in that group; None: a primary member of stage 0, in a role named like the job."""
    trace_vars: dict[str, str] = Factory(dict)
    """Variables with which its processes continue a trace (`fray.model.monitoring.trace_context`); empty: none."""

    @property
    def outlives_scope(self) -> bool:
        """Return whether it stays when the scope in which it was launched is left."""
        return self.detached or self.owned_by_job


class JobState(StrEnum):
    """State of a job."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def finished(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class EndReason(StrEnum):
    """Reason for the end of an attempt or a job: the first cause, not the last symptom."""

    SUCCEEDED = "succeeded"
    FAILURE = "failure"
    """An exception of user code or a non-zero exit code."""
    KILLED = "killed"
    """The process died by a signal that Fray did not send. Counts against the failure budget."""
    OUT_OF_MEMORY = "out_of_memory"
    ENVIRONMENT = "environment"
    """The process could not be started as asked. Never retried."""
    PREEMPTED = "preempted"
    MACHINE_LOST = "machine_lost"
    STOPPED = "stopped"
    """Terminated on request."""
    OWNER_ENDED = "owner_ended"
    GANG = "gang"
    """Another member of the gang ended it; that member's cause is the job's."""
    SIBLING = "sibling"
    """Another member of its supervised group failed: it was ended to restart with that member, or for good with all."""
    GROUP = "group"
    """The job group has ended: by success without this job, or by the failure of another member."""
    UNSCHEDULABLE = "unschedulable"
    TIME_LIMIT = "time_limit"
    """Ran for its ``time_limit_s``. Never retried."""
    PORT_TAKEN = "port_taken"
    """Another process held one of its allocated ports: it was not started. Counts against no budget."""
    NO_ACCOUNT = "no_account"
    """All accounts of its machine were in use by other users: it was not started. Counts against no budget."""


class ExitRule(StrEnum):
    """Meaning of an exit code, as declared by the author of a job."""

    RETRY = "retry"
    """Retry; counts against the failure budget."""
    FAIL = "fail"
    """Fail the job, whatever budget is left."""
    IGNORE = "ignore"
    """Treat as success, like 0."""


@frozen(kw_only=True)
class StoredResult:
    """Location of a value that is too large to be sent, and its hash."""

    location: str
    """Address in fsspec's syntax."""
    sha256: BlobId
    size_bytes: int


@frozen(kw_only=True)
class Outcome:
    """Outcome of one attempt (or, once committed, of one job).

    ``value`` names the pickled result (SUCCEEDED of a callable) or the pickled exception (FAILURE in Python code).
    """

    cause: EndReason
    message: str = ""
    """Message of one paragraph; empty on success."""
    exit_code: int | None = None
    signal: int | None = None
    value: BlobId | None = None
    stored: StoredResult | None = None
    """Replaces ``value`` when it is in the job's ``result_storage``."""
    value_bytes: int = 0
    """Size of the value, set by the controller when it arrives."""
    raised: bool = False
    """An exception left the code (not `SystemExit`): exit code 1 is then Python's own, and no exit rule applies."""
    constructing: bool = False
    """An actor's constructor raised: this attempt served no call, and every waiting call gets that error."""
    duration_s: float = 0.0
    peak_memory_bytes: int = 0
    """Peak memory of the whole process tree, as far as it was measured. 0: unknown."""
    cpu_s: float = 0.0
    """CPU time of the whole process tree, user and system."""
    swept: int = 0
    """Number of processes that it left behind and its shim ended."""
    captured: str = ""
    """Stacks of all threads, taken before it was ended because it stalled or was not healthy."""
    machine_fault: bool = False
    """The machine itself is to blame: it could not make a directory, or a process."""


@frozen(kw_only=True)
class AttemptInfo:
    """One attempt, for records."""

    attempt_id: AttemptId
    node: str
    cause: EndReason | None = None
    message: str = ""
    exit_code: int | None = None
    signal: int | None = None
    pid: int | None = None
    start_time: float | None = None
    end_time: float | None = None
    peak_memory_bytes: int = 0
    cpu_s: float = 0.0
    swept: int = 0
    """Number of processes that it left behind and its shim ended."""
    captured: str = ""
    ports: dict[str, int] = Factory(dict)
    place_time: float | None = None
    """Time when it was placed on its machine."""
    duration_s: float = 0.0
    progress: Progress | None = None
    """Progress it last reported with `fray.progress`."""
    memory_bytes: int = 0
    """Current memory of its processes."""
    health: str = ""
    """Health while it runs: ``well``, ``stalled``, or what was wrong at the last check; empty without a health
    check."""
    host: str = ""
    """Host or IP under which peers reach its machine."""
    calls: ServedCalls | None = None
    """Calls that its process serves, while it runs, if it is an actor in a process of its own."""

    @property
    def addresses(self) -> dict[str, str]:
        """``host:port`` by name of the port."""
        return {name: address_of(self.host, port) for name, port in self.ports.items()}

    def with_metrics(self, metrics: AttemptMetrics) -> AttemptInfo:
        """Return this record with what was measured last. Final values of the record take precedence."""
        ended = self.cause is not None
        return evolve(
            self,
            progress=metrics.progress or self.progress,
            memory_bytes=0 if ended else metrics.memory_bytes,
            peak_memory_bytes=max(self.peak_memory_bytes, metrics.peak_memory_bytes),
            cpu_s=self.cpu_s if ended and self.cpu_s else metrics.cpu_s,
            health="" if ended else metrics.health,
            captured=self.captured or metrics.captured,
            calls=None if ended else metrics.calls,
        )


@frozen(kw_only=True)
class JobInfo:
    """A job's state. Times are seconds since the epoch."""

    job_id: JobId
    name: str
    state: JobState
    error_message: str | None = None
    start_time: float | None = None
    end_time: float | None = None
    namespace: Namespace = ""
    owner: str = ""
    """Session, attempt or job whose end ends this job; empty when detached."""
    cause: EndReason | None = None
    exit_code: int | None = None
    signal: int | None = None
    value: BlobId | None = None
    stored: StoredResult | None = None
    """Location of a value that was too large to be sent (``JobRequest.result_storage``)."""
    reason: str = ""
    """Reason for waiting, while it waits."""
    reason_kind: str = ""
    """Code of the main reason's kind (`fray.scheduler.reasons.ReasonKind`); empty while it does not wait."""
    attempts: tuple[AttemptInfo, ...] = ()
    progress: Progress | None = None
    """Progress it last reported with `fray.progress`."""
    ended_by: str = ""
    """User or job that requested its end, if any."""
    launch_time: float | None = None
    parent: JobId = ""
    """Job whose process launched it, also if it has another owner."""
    user: str = ""
    retries: dict[str, int] = Factory(dict)
    """Number of restarts by the `EndReason` of the end before."""
    first_member: int | None = None
    """Member of a gang that ended first, in a generation that failed."""
    job_group: str = ""
    """Id of its job group; empty without one."""
    role: str = ""
    """Role in that group."""
    absorbed: bool = False
    """Failed without failing its job group: no scope raises."""

    @property
    def duration_s(self) -> float | None:
        """Seconds from its first start to its end; None before both are known."""
        return None if self.start_time is None or self.end_time is None else self.end_time - self.start_time

    @property
    def members(self) -> tuple[AttemptInfo, ...]:
        """Living attempts, in order of rank; empty while it waits for machines and after its end."""
        return tuple(attempt for attempt in self.attempts if attempt.cause is None)

    @property
    def ports(self) -> dict[str, str]:
        """``host:port`` by name, of the first living member; empty without one. For others see ``members``."""
        return self.members[0].addresses if self.members else {}

    def with_metrics(self, metrics: Mapping[AttemptId, AttemptMetrics]) -> JobInfo:
        """Return this record with what was measured of its attempts.

        The job's progress is that of the first member that reports any, in the newest generation.
        """
        attempts = tuple(
            attempt.with_metrics(metrics[attempt.attempt_id]) if attempt.attempt_id in metrics else attempt
            for attempt in self.attempts
        )
        reporting = [attempt for attempt in attempts if attempt.progress is not None]
        if attempts == self.attempts and not reporting:
            return self
        newest = min(reporting, key=_newest_first, default=None)
        return evolve(self, attempts=attempts, progress=self.progress if newest is None else newest.progress)


def _newest_first(attempt: AttemptInfo) -> tuple[int, int]:
    _, generation, member = split_attempt(attempt.attempt_id)
    return -generation, member


def address_of(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Desired and observed state of nodes ---------------------------------------------------------------------------------


class Phase(StrEnum):
    """Phase of an attempt on its node."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@frozen(kw_only=True)
class GangMember:
    """One member of a gang, as every member sees it."""

    host: str
    """Host or IP under which its machine is reached."""
    ports: dict[str, int] = Factory(dict)

    def address(self, name: str) -> str:
        """Return ``host:port`` of the named port. Raises KeyError: no such port."""
        return address_of(self.host, self.ports[name])


@frozen(kw_only=True)
class GangRoster:
    """Members of a gang as columns.

    Every member's desired attempt holds it: for a thousand members, objects would be a million small ones to serialize,
    while the column texts are the same for all.
    """

    hosts: str
    """Hosts of their machines, in order of rank, separated by blanks."""
    ports: dict[str, str] = Factory(dict)
    """Port numbers by name of the port, in the same order."""

    @classmethod
    def of(cls, members: Sequence[GangMember]) -> GangRoster:
        """Return the roster of these members, which all have ports of the same names."""
        names = members[0].ports if members else ()
        ports = {name: " ".join(str(peer.ports[name]) for peer in members) for name in names}
        return cls(hosts=" ".join(peer.host for peer in members), ports=ports)

    def members(self) -> tuple[GangMember, ...]:
        """Return the members as objects, in order of rank."""
        columns = {name: numbers.split(" ") for name, numbers in self.ports.items()}
        return tuple(
            GangMember(host=host, ports={name: int(numbers[rank]) for name, numbers in columns.items()})
            for rank, host in enumerate(self.hosts.split(" "))
        )


@frozen(kw_only=True)
class DesiredAttempt:
    """One attempt that a node should run. Attempts absent from the desired set are ended if alive, then forgotten."""

    attempt_id: AttemptId
    spec: JobSpec
    devices: tuple[str, ...] = ()
    ports: dict[str, int] = Factory(dict)
    roster: GangRoster | None = None
    """All members of its gang, itself included; None for a job that is not a gang."""
    group_members: dict[str, GangRoster] = Factory(dict)
    """Members with ports of its job group by role, as of the time of this desired state."""
    stop: bool = False
    """End it (by the spec's termination policy) and report its outcome."""
    stop_cause: EndReason = EndReason.STOPPED
    notice_s: float | None = None
    """Preemption notice: seconds until its termination begins. None: it is not being preempted."""
    key: str = field(default="", repr=False)
    """Credential with which the attempt's process dials the controller; never stored, added by the gateway."""
    secrets: dict[str, str] = field(factory=dict, repr=False)
    """Values sent by its author, by name of the secret; never stored, added by the gateway."""

    @property
    def members(self) -> tuple[GangMember, ...]:
        """All members of its gang, in order of rank; empty for a job that is not a gang."""
        return self.roster.members() if self.roster is not None else ()


@frozen(kw_only=True)
class ObservedAttempt:
    """One attempt as a node sees it."""

    attempt_id: AttemptId
    phase: Phase
    pid: int | None = None
    outcome: Outcome | None = None
    """Outcome, set exactly when ``phase`` is ENDED; its value is sent as an attachment."""


@frozen(kw_only=True)
class JobAccount:
    """Account of the machine under which the jobs of one user run."""

    uid: int
    gid: int
    name: str
    """Name of the user, for programs that ask for it."""
    directory: str
    """Directory of what the account keeps between attempts; of root, as are the names in it."""

    @property
    def home(self) -> str:
        """Home directory."""
        return f"{self.directory}/home"

    @property
    def environments(self) -> str:
        """Directory of the environments that were built for it."""
        return f"{self.directory}/environments"


@frozen(kw_only=True)
class AttemptSpec:
    """Input of one attempt's process; passed on a file descriptor, never on a command line."""

    attempt_id: AttemptId
    spec: JobSpec
    controller: str
    """Address of the controller, as `fray.net` writes it."""
    key: str = field(repr=False)
    payload_path: str | None = None
    directory: str = ""
    """The attempt's own directory (exists, mode 0700)."""
    sockets: str = ""
    """Directory of its Unix sockets (exists, mode 0700). Empty: its own directory."""
    account: JobAccount | None = None
    """Account that it runs under; None: that of the node."""
    node: str = ""
    advertise: str = "127.0.0.1"
    """Host or IP under which peers reach this node's TCP listeners."""
    finds_address: bool = False
    """True where ``advertise`` was found and not given: the machine's address may have changed since."""
    networked: bool = False
    """True where the node is authenticated and reachable from other machines: listen on TCP too."""
    devices: tuple[str, ...] = ()
    """Ids of the accelerators granted to it (``gpu-0``, …)."""
    ports: dict[str, int] = Factory(dict)
    """Allocated ports on this machine, by name."""
    members: tuple[GangMember, ...] = ()
    """All members of its gang, in order of rank; see `DesiredAttempt`."""
    group_members: dict[str, tuple[GangMember, ...]] = Factory(dict)
    """Members of its job group by role; see `DesiredAttempt`."""
    cluster_vars: dict[str, str] = Factory(dict)
    """Variables of every job of the cluster."""
    secrets: dict[str, str] = field(factory=dict, repr=False)
    """Values by name of the secret. A spec that contains any is never written to disk."""

    def secret_vars(self) -> dict[str, str]:
        """Return the variables that hold secrets, with their values."""
        named = self.spec.secrets.items()
        return {variable: self.secrets[name] for variable, name in named if name in self.secrets}
