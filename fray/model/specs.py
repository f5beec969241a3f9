"""Jobs: what travels of one (`JobSpec`), what came of it (`Outcome`, `JobInfo`), and the words of its node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from attrs import Factory, evolve, field

from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentSpec
from fray.model.exit_rules import ExitRule
from fray.model.frozen import frozen
from fray.model.ids import AttemptId, BlobId, JobId, Namespace, split_attempt
from fray.model.job_groups import JobRole
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.monitoring.health import HealthCheck, OnStall, Progress
from fray.model.policy.priority import Band
from fray.model.resources import Demand


class SupervisionStrategy(StrEnum):
    """Which members of a supervised group begin anew when one of them fails (Erlang's words)."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"
    """The failed one and those created after it."""


@frozen(kw_only=True)
class ActorConfig:
    """How an actor is run, beyond its class and arguments.

    Attributes:
        max_concurrency: calls under way at once. Default: any number for a class with an async method, else 1.
        concurrency_groups: name to limit; a method says its group with ``@fray.method(concurrency_group="io")``.
        max_restarts: how often a failed actor is made anew from its arguments; -1: always. Default None: 0, unless the
            face that asks has another default.
        restart_period_s: ``max_restarts`` counts those of the last so many seconds. Default None: of the whole life.
        backoff_s: wait before the first restart; doubled with each further one. Default 0.
        backoff_max_s: longest such wait. Default 30.
        kill_after_s: a sync call that was cancelled and goes on for so long costs the process its life (the actor then
            restarts as after a failure). Default None: it is told, and left alone.
        idle_s: the actor ends in order when nobody has called it for so long. Default None: never.
        cleanup_s: how long the cleanup hook may take. Default 5.
        may_overlap: make it anew as soon as its machine is suspect (silent for 30 s), and not only once that machine is
            proven dead or its lease (600 s) is over: for a while the old one may still run somewhere. Default False.
        checkpoint_every_s: how often its ``__fray_checkpoint__`` is asked for the state. Default None: only on demand
            and when it is ended in order.
        health: ``HealthCheck(actor="ping")``: this method of it is called every so often, in its turn among the others;
            an actor that does not answer well fails. Default None: it is well while its process runs.
        checkpoint_storage: where checkpoints over 8 MiB go, as fsspec writes it: ``file:///shared/ckpt``,
            ``gs://bucket/ckpt``. Default None: they are refused.
        wait_limit_s: it fails as ``unschedulable`` when it has waited so long for a machine. Default None: it waits on.
        must_start: what its constructor raises at first is final, whatever ``max_restarts`` allows. Default False.

    Raises:
        InvalidRequest: an impossible amount of something.
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

    def __attrs_post_init__(self) -> None:
        if self.max_restarts is not None and self.max_restarts < -1:
            raise InvalidRequest(f"max_restarts={self.max_restarts} must be 0 or more, or -1 for always")
        for name in ("restart_period_s", "checkpoint_every_s", "idle_s", "wait_limit_s"):
            amount = getattr(self, name)
            if amount is not None and not amount > 0:
                raise InvalidRequest(f"{name}={amount} must be more than 0 seconds; leave it out for none")
        for name in ("backoff_s", "backoff_max_s", "cleanup_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest(f"{name}={getattr(self, name)} must be 0 or more seconds")


RESULT_GONE = "it succeeded, and its result is no longer kept"
"""In place of an error: whoever wants the result is told."""
BLOB_LIMIT_BYTES = 8 * 1024 * 1024
"""One pickled payload or result; bigger things belong into storage, with their path in its place."""

# What travels --------------------------------------------------------------------------------------------------------


class EntryKind(StrEnum):
    CALLABLE = "callable"
    """Payload: pickle of ``(fn, args, kwargs)``."""
    ACTOR = "actor"
    """Payload: pickle of ``(cls, args, kwargs)``; the process hosts the instance until told to end."""
    BINARY = "binary"
    """No payload: ``argv``."""


TERMINATION_LIMIT_S = 24 * 3600.0
"""Longest time on one rung: an end has to come."""


@frozen(kw_only=True)
class TerminationPolicy:
    """How a running attempt is ended: cancel, then SIGTERM after ``cancel_s``, then SIGKILL after ``term_s`` more.

    Programs cannot be cancelled and begin with SIGTERM, at once.

    Attributes:
        cancel_s: seconds from the request to SIGTERM; 0: at once. Default 3.
        term_s: seconds from SIGTERM to SIGKILL; 0: no SIGTERM that could be heard. Default 2.

    Raises:
        InvalidRequest: an amount below 0, without an end, or over `LADDER_LIMIT_S`.
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
                    f"Ladder({name}={amount!r}) must be a number of seconds from 0 to {TERMINATION_LIMIT_S:g}: "
                    "the last rung must be reached"
                )


@frozen(kw_only=True)
class SupervisedGroup:
    """A supervised group that a job is a member of; all its members are launched together."""

    group_id: str
    strategy: SupervisionStrategy
    index: int
    """Place in the order of creation."""


@frozen(kw_only=True)
class JobSpec:
    """One job as the controller and the nodes know it. The payload stays closed: they carry its hash."""

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
    exclusive_name: bool = True
    """Refuse the job with `NameInUse` while another of this name lives in the namespace."""
    termination: TerminationPolicy = Factory(TerminationPolicy)
    log_to_owner: bool = True
    """Send what the job prints to the session that owns it."""
    actor: ActorConfig | None = None
    """Set for actors."""
    group: str = ""
    """Name of the actor group it is a member of."""
    index: int = 0
    """Its place in that group."""
    siblings: SupervisedGroup | None = None
    """Whom its failure concerns."""
    get_if_exists: bool = False
    """A living actor of this name is what is wanted: answer with that one instead of `NameInUse`."""
    adopt_existing: bool = False
    """A living job of this name is what is wanted, if it is of the same request."""
    signature: str = ""
    """What the payload does, to compare requests of different processes: pickles of one thing differ."""
    user: str = ""
    """At whose hands it, or the job it was launched by, came here."""
    environment: EnvironmentSpec = Factory(EnvironmentSpec)
    """What its process is made of, beyond what is on the node."""
    secrets: dict[str, str] = Factory(dict)
    """Variable to the name of the secret it holds. Values are in no spec and no store."""
    ports: tuple[str, ...] = ()
    """Names of ports it wants."""
    gang: bool = False
    """Its members, even if it is one alone, are told their rank and a coordinator. More than one always are."""
    health: HealthCheck | None = None
    stall_s: float | None = None
    on_stall: OnStall = OnStall.CAPTURE
    max_retries_machine_loss: int | None = None
    """None: the budget for preemption pays."""
    max_retries_out_of_memory: int | None = None
    """None: the budget for failures pays."""
    exit_codes: dict[int, ExitRule] = Factory(dict)
    backoff_s: float = 0.0
    backoff_max_s: float = 30.0
    result_storage: str = ""
    """Where a result over `BLOB_LIMIT_BYTES` goes; empty: it is an error."""
    memory_limit_bytes: int = 0
    """More than this of one member's process tree is its end; 0: no limit."""
    pin_cpus: bool = False
    """Run on CPUs of its own: the demand is of whole ones."""
    alternatives: tuple[Demand, ...] = ()
    """Any-of devices: what else would do in place of ``demand``, in order; they differ in their devices alone."""
    band: Band | None = None
    """None: that of the job that launches it, else interactive."""
    time_limit_s: float | None = None
    """It is ended so long after its start; None: never."""
    notice_s: float = 0.0
    """When its place is taken: how long before its ladder begins it is told so."""
    wait_limit_s: float | None = None
    """It has failed when it has waited so long for machines; None: it waits on."""
    reservation_id: str = ""
    """Whose machines it takes; empty: those of the fleet."""
    job_group: str = ""
    """Id of the group with which it is placed; empty: by itself."""
    role: JobRole | None = None
    """In that group; None: a primary member of stage 0, in a role of its own name."""


class JobState(StrEnum):
    """Status of a job (seed 000)."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def finished(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


class EndReason(StrEnum):
    """Why an attempt or a job ended: the first cause, not the last symptom."""

    SUCCEEDED = "succeeded"
    FAILURE = "failure"
    """An exception of user code or a non-zero exit code."""
    KILLED = "killed"
    """The process died by a signal nobody of Fray's sent. Spends the failure budget."""
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
    """Another member of its group failed: it was ended to begin anew with that one, or for good with all."""
    GROUP = "group"
    """Its job group is over: it has succeeded without this one, or another member has failed it."""
    UNSCHEDULABLE = "unschedulable"
    TIME_LIMIT = "time_limit"
    """It had run for its ``time_limit_s``. Never retried."""
    PORT_TAKEN = "port_taken"
    """A stranger held one of the ports it was given: it was not started. No budget of its user pays."""


@frozen(kw_only=True)
class StoredResult:
    """Where a value is that is too large to travel, and how to know that it is the one."""

    location: str
    """As fsspec writes it."""
    sha256: BlobId
    size_bytes: int


@frozen(kw_only=True)
class Outcome:
    """How one attempt (or, committed, one job) ended.

    ``value`` names the pickled result (SUCCEEDED of a callable) or the pickled exception (FAILURE in Python code).
    """

    cause: EndReason
    message: str = ""
    """One paragraph for people; empty on success."""
    exit_code: int | None = None
    signal: int | None = None
    value: BlobId | None = None
    stored: StoredResult | None = None
    """In place of ``value``: it is in the job's ``result_storage``."""
    value_bytes: int = 0
    """Size of the value, written down by the controller when it comes."""
    raised: bool = False
    """An exception left the code (not `SystemExit`): exit code 1 is Python's word then, and no rule is about it."""
    constructing: bool = False
    """An actor's constructor raised: this attempt served no call, and each call that waited gets that very error."""
    duration_s: float = 0.0
    peak_memory_bytes: int = 0
    """Of the whole tree of processes, as far as it was watched. 0: not known."""
    cpu_s: float = 0.0
    """Of the whole tree, user and system."""
    swept: int = 0
    """Processes that it left behind, and that its keeper ended."""
    captured: str = ""
    """Stacks of all threads, taken before it was ended because it stalled or was not healthy."""
    machine_fault: bool = False
    """Its machine says that it is to blame itself: it could not make a directory, or a process."""


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
    """Processes that it left behind, and that its keeper ended."""
    captured: str = ""
    ports: dict[str, int] = Factory(dict)
    place_time: float | None = None
    """When it was given its machine."""
    duration_s: float = 0.0
    progress: Progress | None = None
    """What it last said of itself by `fray.progress`."""
    memory_bytes: int = 0
    """Of its processes, now."""
    health: str = ""
    """While it runs: ``well``, ``stalled``, or what was wrong the last time it was asked; empty where nobody asks."""
    host: str = ""
    """How peers reach its machine."""

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
        )


@frozen(kw_only=True)
class JobInfo:
    """A job's state. The first six fields are seed 000's; times are seconds since the epoch."""

    job_id: JobId
    name: str
    state: JobState
    error_message: str | None = None
    start_time: float | None = None
    end_time: float | None = None
    namespace: Namespace = ""
    owner: str = ""
    """Session or attempt whose end ends this job; empty when detached."""
    cause: EndReason | None = None
    exit_code: int | None = None
    signal: int | None = None
    value: BlobId | None = None
    stored: StoredResult | None = None
    """Where the value is, if it was too large to travel (``JobRequest.result_storage``)."""
    reason: str = ""
    """Why it waits, while it waits."""
    attempts: tuple[AttemptInfo, ...] = ()
    progress: Progress | None = None
    """What it last said of itself by `fray.progress`."""
    ended_by: str = ""
    """Who asked for its end, if somebody did."""
    launch_time: float | None = None
    parent: JobId = ""
    """The job whose process launched it, whoever owns it."""
    user: str = ""
    retries: dict[str, int] = Factory(dict)
    """How often it was made anew, by the `Cause` of the end before."""
    first_member: int | None = None
    """Of a gang: which member ended first, in a generation that ended badly."""
    job_group: str = ""
    """Id of its job group; empty: it is in none."""
    role: str = ""
    """In that group."""
    absorbed: bool = False
    """It failed, and that is no failure of its job group: no scope is told."""

    @property
    def duration_s(self) -> float | None:
        """From its first start to its end; None before there are both."""
        return None if self.start_time is None or self.end_time is None else self.end_time - self.start_time

    @property
    def members(self) -> tuple[AttemptInfo, ...]:
        """The living attempts, in order of rank; none while it waits for machines, and when it has ended."""
        return tuple(attempt for attempt in self.attempts if attempt.cause is None)

    @property
    def ports(self) -> dict[str, str]:
        """``host:port`` by name, of the first living member; empty while none lives. Others: see ``members``."""
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
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# On the node ---------------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    """Where an attempt is on its node."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@frozen(kw_only=True)
class GangMember:
    """One member of a gang, as every member is told of it."""

    host: str
    """How its machine is reached."""
    ports: dict[str, int] = Factory(dict)

    def address(self, name: str) -> str:
        """``host:port`` of its port of this name. Raises KeyError."""
        return address_of(self.host, self.ports[name])


@frozen(kw_only=True)
class GangRoster:
    """The members of a gang as columns. Each member's wish has it: a thousand times a thousand members would else be a
    million small objects to write, while the texts are the same for all.
    """

    hosts: str
    """How their machines are reached, in order of rank, with blanks between."""
    ports: dict[str, str] = Factory(dict)
    """Their numbers, by name of the port, in the same order."""

    @classmethod
    def of(cls, members: Sequence[GangMember]) -> GangRoster:
        """All have ports of the same names."""
        names = members[0].ports if members else ()
        ports = {name: " ".join(str(peer.ports[name]) for peer in members) for name in names}
        return cls(hosts=" ".join(peer.host for peer in members), ports=ports)

    def members(self) -> tuple[GangMember, ...]:
        """One by one again."""
        columns = {name: numbers.split(" ") for name, numbers in self.ports.items()}
        return tuple(
            GangMember(host=host, ports={name: int(numbers[rank]) for name, numbers in columns.items()})
            for rank, host in enumerate(self.hosts.split(" "))
        )


@frozen(kw_only=True)
class DesiredAttempt:
    """One attempt a node shall hold. Absent from the wanted set: end it if it lives, then forget it."""

    attempt_id: AttemptId
    spec: JobSpec
    devices: tuple[str, ...] = ()
    ports: dict[str, int] = Factory(dict)
    roster: GangRoster | None = None
    """All members of its gang, itself included; None for a job that is no gang."""
    group_members: dict[str, GangRoster] = Factory(dict)
    """Of a job group: by role, where those members are that have ports, as it was when this was wished."""
    stop: bool = False
    """End it (by the spec's ladder) and report its outcome."""
    stop_cause: EndReason = EndReason.STOPPED
    notice_s: float | None = None
    """Its place is taken: it is told so now, and its ladder begins so much later. None: that is not why it is ended."""
    key: str = field(default="", repr=False)
    """Credential with which the attempt's process dials the controller; never stored, filled in by the gateway."""
    secrets: dict[str, str] = field(factory=dict, repr=False)
    """Values that its author brought, by name of the secret; never stored, and filled in likewise."""
    followed: bool = True
    """Send its log lines."""

    @property
    def members(self) -> tuple[GangMember, ...]:
        """All members of its gang, in order of rank; none for a job that is no gang."""
        return self.roster.members() if self.roster is not None else ()


@frozen(kw_only=True)
class ObservedAttempt:
    """One attempt as a node sees it."""

    attempt_id: AttemptId
    phase: Phase
    pid: int | None = None
    outcome: Outcome | None = None
    """Set exactly when ``phase`` is ENDED; its value travels as an attachment."""


@frozen(kw_only=True)
class AttemptSpec:
    """All that the process of one attempt needs to know; handed over on a descriptor, never on a command line."""

    attempt_id: AttemptId
    spec: JobSpec
    controller: str
    """Address of the controller, as `fray.net` writes it."""
    key: str = field(repr=False)
    payload_path: str | None = None
    directory: str = ""
    """The attempt's own directory (exists, mode 0700); its Unix sockets live here."""
    node: str = ""
    advertise: str = "127.0.0.1"
    """Host or IP under which peers reach this node's TCP listeners."""
    networked: bool = False
    """True where the node is authenticated and reachable from other machines: listen on TCP too."""
    devices: tuple[str, ...] = ()
    """Ids of the accelerators granted to it (``gpu-0``, …)."""
    ports: dict[str, int] = Factory(dict)
    """Given to it on this machine, by name."""
    members: tuple[GangMember, ...] = ()
    """All members of its gang, in order of rank; see `Wish`."""
    group_members: dict[str, tuple[GangMember, ...]] = Factory(dict)
    """Members of its job group by role; see `Wish`."""
    cluster_vars: dict[str, str] = Factory(dict)
    """Variables of every job of the cluster."""
    secrets: dict[str, str] = field(factory=dict, repr=False)
    """Values by name of the secret. A ticket with some is written to no disk."""

    def secret_vars(self) -> dict[str, str]:
        """Variables that hold secrets, with their values."""
        named = self.spec.secrets.items()
        return {variable: self.secrets[name] for variable, name in named if name in self.secrets}
