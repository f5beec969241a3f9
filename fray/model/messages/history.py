"""Messages about the past: attempts, machines that are gone, and events of the whole cluster, in pages."""

from __future__ import annotations

from attrs import Factory

from fray.model.frozen import frozen
from fray.model.ids import AttemptId, JobId, Namespace, NodeName
from fray.model.messages.client import Event


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
