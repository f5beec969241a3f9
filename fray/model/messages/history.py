"""Messages about the past, in pages: attempts, machines and reservations that are gone, capacity, and all events."""

from __future__ import annotations

from attrs import Factory

from fray.model.frozen import frozen
from fray.model.ids import AttemptId, JobId, Namespace, NodeName
from fray.model.messages.client import Event
from fray.model.reservations import ReservationId


@frozen(kw_only=True)
class AttemptRecord:
    """One attempt and what it held of its machine, for accounting. It outlives the record of its job."""

    attempt_id: AttemptId
    job_id: JobId
    name: str
    """Name of its job."""
    user: str
    namespace: Namespace
    band: str
    node: NodeName
    machine: str
    """Kind of its machine: the variant of its accelerators (``h100``), else ``cpu``."""
    cpu_milli: int
    """Thousandths of CPUs that it held; those that it was lent by the jobs above it are not counted."""
    memory_bytes: int
    device_kind: str = ""
    """``gpu`` or ``tpu``; empty: it held none."""
    device_variant: str = ""
    devices: int = 0
    queued_at: float = 0.0
    """Time since which its job waited for machines before it was placed."""
    placed_at: float
    """Time from which it held its machine, in seconds since the epoch."""
    started_at: float | None = None
    """Time at which it began to run; None: it did not."""
    ended_at: float | None = None
    """Time at which it ended; None: it lives."""
    cause: str = ""
    """Cause of its end, as in `AttemptInfo`; empty while it lives."""
    exit_code: int | None = None
    cpu_s: float = 0.0
    """CPU time that it has used; 0: unknown."""
    peak_memory_bytes: int = 0
    """0: unknown."""
    recorded_at: float = 0.0
    """Time at which its end was decided: that of a lost machine comes after ``ended_at``. 0 while it lives."""


@frozen(kw_only=True)
class GetAttempts:
    """Get a page of attempts: those that live, by machine, and then those that have ended, in the order in which their
    ends were decided. One that ends between two pages is in both. Reply: `AttemptPage`."""

    since: float = 0.0
    """Only attempts whose ends were decided since then, and living ones; seconds since the epoch."""
    user: str = ""
    namespace: Namespace = ""
    job: str = ""
    """Only attempts of jobs of this id or name."""
    node: NodeName = ""
    cursor: str = ""
    """`AttemptPage.cursor` of the page before; empty: the first page."""


@frozen(kw_only=True)
class AttemptPage:
    attempts: tuple[AttemptRecord, ...]
    cursor: str = ""
    """Cursor for the next page; empty: this was the last one."""


@frozen(kw_only=True)
class SumAttempts:
    """Get the sums of what attempts held between two times, as `fray.model.monitoring.accounting.sums` defines them.
    Reply: `AttemptSums`. Error: InvalidRequest, an unknown ``by``."""

    by: str
    """``user``, ``namespace``, ``machine``, ``node``, ``job``, ``cause``; ``day``: by user, namespace and kind of
    machine on each day (UTC)."""
    since: float
    until: float
    """Seconds since the epoch."""
    user: str = ""
    namespace: Namespace = ""
    job: str = ""
    """Only attempts of jobs of this id or name."""
    node: NodeName = ""


@frozen(kw_only=True)
class AttemptSum:
    """Sum over the attempts of one key that held one kind of accelerators, or none."""

    key: str
    name: str = ""
    """Name of the job, in sums by job."""
    user: str = ""
    """User, as ``namespace`` and ``machine`` in sums by day alone."""
    namespace: Namespace = ""
    machine: str = ""
    device: str = ""
    """``gpu:h100``; empty: attempts without accelerators."""
    jobs: int = 0
    """Jobs of the key, also with other kinds of accelerators; 0 in sums by day."""
    attempts: int = 0
    cpu: float = 0.0
    """CPU-hours; ``memory_gib``: GiB-hours; ``chips``: hours of accelerators."""
    memory_gib: float = 0.0
    chips: float = 0.0
    retried_cpu: float = 0.0
    retried_memory_gib: float = 0.0
    retried_chips: float = 0.0
    preempted_cpu: float = 0.0
    preempted_memory_gib: float = 0.0
    preempted_chips: float = 0.0
    cpu_idle: float = 0.0
    cpu_known: float = 0.0
    wait_h: float = 0.0


@frozen(kw_only=True)
class AttemptSums:
    rows: tuple[AttemptSum, ...]
    """Rows in the order of their keys."""
    is_complete: bool = True
    """False: there are too many rows for a reply, or the sender is a job, which may see some attempts of a user alone:
    `GetAttempts` has what is to be summed up."""


@frozen(kw_only=True)
class NodeRecord:
    """Machine that is gone: one incarnation of its ``fray-node``, which has ended or was given up."""

    node: NodeName
    incarnation: str
    kind: str
    """Variant of its accelerators (``h100``), else ``cpu``."""
    cpu_milli: int
    memory_bytes: int
    devices: int = 0
    attributes: dict[str, str] = Factory(dict)
    joined_at: float = 0.0
    """Time at which it joined, in seconds since the epoch; 0: before a controller that records it."""
    gone_at: float
    """Time at which it was last present."""
    reason: str


@frozen(kw_only=True)
class GetNodeHistory:
    """Get the machines that are gone. Reply: `NodeHistory`, the newest 1,000."""

    since: float = 0.0
    """Only those that are gone since then."""
    node: NodeName = ""


@frozen(kw_only=True)
class NodeHistory:
    nodes: tuple[NodeRecord, ...]
    """Oldest end first."""


@frozen(kw_only=True)
class RecordedReservation:
    """One reservation, from its request to its end."""

    reservation_id: ReservationId
    name: str
    namespace: Namespace
    user: str
    owner: str = ""
    """Session or attempt with whose end it ends; empty: it was detached."""
    created_by: str = ""
    """Session that requested it."""
    band: str
    priority: int = 0
    cpu_milli: int
    """Demand on one host of a unit, as ``memory_bytes`` and ``devices``."""
    memory_bytes: int
    device_kind: str = ""
    device_variant: str = ""
    devices: int = 0
    hosts: int = 1
    """Machines of a unit."""
    min_units: int
    max_units: int
    units_given: int = 0
    """Number of the units that it was given in all; a unit that was given back and another one in its place are two."""
    nodes: tuple[NodeName, ...] = ()
    """Machines of these units, in the order in which it was given them; at most the first 1,000."""
    created_at: float
    held_at: float | None = None
    """Time at which its minimum was first held, in seconds since the epoch; None: it never was."""
    ended_at: float | None = None
    """Time at which its last unit was released; None: it lives."""
    reason: str = ""
    """Reason of its end; empty while it lives."""
    ended_by: str = ""
    """User, session or event that ended it."""


@frozen(kw_only=True)
class GetReservationHistory:
    """Get a page of reservations: those that live, by id, and then those that have ended, in the order of their ends.
    One that ends between two pages is in both. Reply: `ReservationPage`."""

    since: float = 0.0
    """Only those that have ended since then, and living ones; seconds since the epoch."""
    cursor: str = ""
    """`ReservationPage.cursor` of the page before; empty: the first page."""


@frozen(kw_only=True)
class ReservationPage:
    reservations: tuple[RecordedReservation, ...]
    cursor: str = ""
    """Cursor for the next page; empty: this was the last one."""


@frozen(kw_only=True)
class FindEvents:
    """Get a page of the event log of the whole cluster. Reply: `EventPage`."""

    since: float = 0.0
    """Only events since then, in seconds since the epoch."""
    user: str = ""
    """Only events of jobs of this user."""
    node: NodeName = ""
    """Only events that name this machine."""
    cursor: int = 0
    """`EventPage.cursor` of the page before; 0: the first page."""


@frozen(kw_only=True)
class EventPage:
    events: tuple[Event, ...]
    cursor: int = 0
    """Cursor for the next page; 0: this was the last one."""


@frozen(kw_only=True)
class CapacitySample:
    """Capacity of one kind in one zone, and what becomes of it: the other amounts add up to ``total``. CPUs, bytes of
    memory, or devices; in a mean over a period also parts of devices."""

    at: float
    """Time in seconds since the epoch; of a mean, the beginning of its period."""
    kind: str
    """``cpu``, ``memory``, ``gpu:h100``, ``tpu:v5litepod-16``."""
    zone: str = ""
    """Zone of the machines; empty: machines without one."""
    total: float
    """Amount of all machines that are not known to be dead."""
    used: float = 0.0
    """Held by attempts."""
    reserved: float = 0.0
    """Held by reservations, and by no attempt in them."""
    idle: float = 0.0
    """Given to nothing, and open for attempts."""
    quarantined: float = 0.0
    """Used by no attempt, of machines in quarantine."""
    closed: float = 0.0
    """Used by no attempt, of machines that are cordoned, drained, leaving or silent, and devices that their node
    withholds."""


@frozen(kw_only=True)
class GetCapacity:
    """Get the capacity of this moment, and its means over periods. Reply: `CapacityHistory`."""

    since: float
    until: float
    """Seconds since the epoch; nothing between them: only the capacity of this moment."""
    period_s: float = 60.0


@frozen(kw_only=True)
class CapacityHistory:
    samples: tuple[CapacitySample, ...]
    """Means by period, kind and zone; a period in which nothing was recorded is left out."""
    current: tuple[CapacitySample, ...]
    """Capacity of this moment."""
    next_at: float = 0.0
    """Time since which to ask for what did not fit into the reply; 0: nothing."""
