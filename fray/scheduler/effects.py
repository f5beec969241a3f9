"""Events (the scheduler's input) and effects (its output). All frozen.

The controller's loop turns frames into events, calls `fray.scheduler.step.step`, saves what is dirty, and only then
carries the effects out.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import field, frozen

from fray.errors import FrayError
from fray.model.ids import ActorId, AttemptId, BlobId, JobId, Namespace, NodeName, SessionId
from fray.model.messages.client import Event as LogEvent
from fray.model.messages.client import Launch, ProcessMark, Register, Role
from fray.model.messages.history import AttemptRecord, NodeRecord, RecordedReservation
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.policy.machine_groups import ErrorKind, SeenMachine
from fray.model.policy.policy import Policy
from fray.model.reservations import ReservationId, ReservationSpec

# Events ---------------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ControllerStarted:
    """The controller has started on its store (also the first time). Presence timers start again in full."""

    epoch: int
    declares_all_nodes: bool = False
    """True: the nodes of this cluster are known beforehand (embedded), and a job that fits none of ``declared`` never
    will."""
    declared: tuple[NodeHello, ...] = ()
    policy: Policy = Policy()  # noqa: RUF009 - it is a value
    cluster: str = ""
    """Mark that distinguishes names of this cluster's machines from those of other clusters."""


@frozen(kw_only=True)
class PolicyChanged:
    """The operator has changed the policy. Jobs that were accepted under the old one stay."""

    policy: Policy


@frozen(kw_only=True)
class SessionOpened:
    """A driver, job or tool has connected (again). ``attempt_id`` is set for jobs."""

    session: SessionId
    role: Role
    namespace: Namespace
    grace_s: float = 30.0
    attempt_id: AttemptId | None = None
    user: str = ""
    process: ProcessMark | None = None
    """The session's process, if it is proven to be a process of the controller's own machine."""


@frozen(kw_only=True)
class SessionLost:
    """The connection was lost without a goodbye. A driver has its grace period; for a job its attempt decides."""

    session: SessionId


@frozen(kw_only=True)
class SessionClosed:
    """Goodbye, or proof that the process is dead: all it owns ends now."""

    session: SessionId
    reason: str = "driver left"
    ref: int | None = None
    """Request to which `Done` is the reply once everything the session owned has ended."""


@frozen(kw_only=True)
class LaunchRequested:
    session: SessionId
    ref: int
    launch: Launch


@frozen(kw_only=True)
class TerminateRequested:
    session: SessionId
    ref: int
    jobs: tuple[JobId, ...]
    reason: str
    name: str = ""
    prefix: str = ""
    namespace: Namespace | None = None
    tree: bool = False
    own: bool = False
    group: str = ""


@frozen(kw_only=True)
class RequeueRequested:
    session: SessionId
    ref: int
    generations: dict[JobId, int]
    reason: str


@frozen(kw_only=True)
class NodeJoined:
    """A node has connected (first, again, or as a new incarnation: then all it held before is dead)."""

    hello: NodeHello


@frozen(kw_only=True)
class NodeReported:
    node: NodeName
    incarnation: str
    report: ObservedState


@frozen(kw_only=True)
class NodeSilent:
    """The node's connection was lost: it may be dead or merely cut off."""

    node: NodeName
    incarnation: str
    # Silence counts from the last sign of life, not from its discovery, which may be many seconds later.
    silent_s: float = 0.0
    """Seconds since its last sign of life when the loss was noticed."""
    has_answered: bool = False
    """True if its machine has ended the connection, and no node there has dialed again: it is suspect at once."""


@frozen(kw_only=True)
class NodeDied:
    """Proof: this incarnation and every attempt it held are gone for good."""

    node: NodeName
    incarnation: str
    reason: str


@frozen(kw_only=True)
class NodeProbed:
    """A node has answered a probe (`ProbeWanted`), or cannot be reached."""

    node: NodeName
    incarnation: str
    problem: str = ""
    """Problem the probe found; empty: none."""


@frozen(kw_only=True)
class NodeLeaving:
    """The node was asked to shut down: jobs that may end by themselves have ``finish_s``, others are ended now."""

    node: NodeName
    incarnation: str
    finish_s: float
    reason: str


@frozen(kw_only=True)
class CordonRequested:
    """See `fray.model.messages.maintenance.CordonNodes`."""

    session: SessionId
    ref: int
    nodes: tuple[NodeName, ...]
    reason: str = ""
    drain: bool = False
    finish_s: float = 0.0


@frozen(kw_only=True)
class UncordonRequested:
    session: SessionId
    ref: int
    nodes: tuple[NodeName, ...]


@frozen(kw_only=True)
class AttemptAnnotated:
    """A node has observed something worth a line in the event log of the job; nothing else changes."""

    node: NodeName
    incarnation: str
    attempt_id: AttemptId
    kind: str
    text: str = ""


@frozen(kw_only=True)
class NameRegistered:
    session: SessionId
    ref: int
    register: Register


@frozen(kw_only=True)
class NameUnregistered:
    session: SessionId
    ref: int
    actor_id: ActorId


@frozen(kw_only=True)
class CheckpointTaken:
    """An actor's process has handed in its state; the content is stored already."""

    session: SessionId
    ref: int
    number: int
    blob: BlobId | None = None
    location: str = ""


@frozen(kw_only=True)
class WaitReported:
    """The process of an attempt waits for jobs that it launched, or for none any more."""

    session: SessionId
    ref: int
    waiting: bool


@frozen(kw_only=True)
class MachineAnswered:
    """A provider's answer to an order to create or delete a unit."""

    name: str
    is_delete: bool = False
    """True: the order was to delete the unit; False: to create it."""
    error: ErrorKind | None = None
    message: str = ""


@frozen(kw_only=True)
class MachinesListed:
    """All machines that a provider has, or why it cannot list them."""

    provider: str
    machines: tuple[SeenMachine, ...] = ()
    # With it an old list cannot undo what was decided while the provider was answering.
    asked_at: float = 0.0
    """Time of the request for the list, by the scheduler's clock: later decisions are not in it."""
    error: str = ""


@frozen(kw_only=True)
class GroupScaled:
    """An operator sets a group's minimum and maximum over those of the policy; None: as in the policy."""

    session: SessionId
    ref: int
    group: str
    min: int | None = None
    max: int | None = None


@frozen(kw_only=True)
class ReservationRequested:
    session: SessionId
    ref: int
    spec: ReservationSpec


@frozen(kw_only=True)
class ReservationRenewed:
    session: SessionId
    ref: int
    reservation_id: ReservationId
    ttl_s: float | None = None
    """Seconds from now on; None: as before."""


@frozen(kw_only=True)
class ReservationReleased:
    session: SessionId
    ref: int
    reservation_id: ReservationId
    reason: str = "released"


@frozen(kw_only=True)
class Tick:
    """Time has passed: `State.next_deadline` is due."""


Event: TypeAlias = (
    ControllerStarted
    | PolicyChanged
    | SessionOpened
    | SessionLost
    | SessionClosed
    | LaunchRequested
    | TerminateRequested
    | RequeueRequested
    | NodeJoined
    | NodeReported
    | NodeSilent
    | NodeDied
    | NodeLeaving
    | NodeProbed
    | CordonRequested
    | UncordonRequested
    | AttemptAnnotated
    | NameRegistered
    | NameUnregistered
    | CheckpointTaken
    | WaitReported
    | MachineAnswered
    | MachinesListed
    | GroupScaled
    | ReservationRequested
    | ReservationRenewed
    | ReservationReleased
    | Tick
)

# Effects --------------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Reply:
    """Answer request ``ref`` of ``session`` with a message of `fray.model.messages.client`."""

    session: SessionId
    ref: int
    message: object


@frozen(kw_only=True)
class Refusal:
    session: SessionId
    ref: int
    # Exceptions compare by identity, so that equal refusals would differ.
    error: FrayError = field(eq=False)


@frozen(kw_only=True)
class JobInfoChanged:
    """A job's `JobInfo` has changed: notify those who watch it."""

    # Only the id: the record is made from the saved state, once for all who watch it, and not at all if there are none.
    job_id: JobId


@frozen(kw_only=True)
class ReservationInfoChanged:
    """A reservation's `ReservationInfo` has changed: notify those who watch it."""

    reservation_id: ReservationId


@frozen(kw_only=True)
class NamesChanged:
    """The endpoints under a key (see `Watch.key`) have changed: notify those who watch it."""

    key: str


@frozen(kw_only=True)
class DesiredAttemptsChanged:
    """A node's desired attempts have changed: send it those in ``changed``; those in ``gone`` are no longer desired."""

    node: NodeName
    changed: tuple[AttemptId, ...] = ()
    gone: tuple[AttemptId, ...] = ()


@frozen(kw_only=True)
class ProbeWanted:
    """Ask a node to probe itself; the answer is `NodeProbed`."""

    node: NodeName
    incarnation: str


@frozen(kw_only=True)
class CloseSession:
    """Close the connection of this session: all it owned has ended, or is being ended for its absence."""

    session: SessionId
    reason: str


@frozen(kw_only=True)
class FleetChanged:
    """There are orders for providers (`State.fleet.orders`), or units that must be looked after."""


@frozen(kw_only=True)
class DeleteBlobs:
    """Delete payloads to which no living job refers."""

    blobs: tuple[BlobId, ...]


@frozen(kw_only=True)
class EventRecorded:
    """A line for the event log."""

    event: LogEvent


@frozen(kw_only=True)
class HistoryRecorded:
    """A row for the history, which the scheduler does not need itself: an attempt, machine or reservation has ended."""

    record: AttemptRecord | NodeRecord | RecordedReservation


@frozen(kw_only=True)
class EventRefused:
    """An event could not be handled, because of a defect of the controller: the state is as it was before it.

    Not of the scheduler, but of the loop that has called it.
    """

    event: Event
    error: FrayError = field(eq=False)


Effect: TypeAlias = (
    Reply
    | Refusal
    | JobInfoChanged
    | ReservationInfoChanged
    | NamesChanged
    | DesiredAttemptsChanged
    | ProbeWanted
    | CloseSession
    | FleetChanged
    | DeleteBlobs
    | EventRecorded
    | HistoryRecorded
    | EventRefused
)
