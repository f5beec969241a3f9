"""Phases of jobs, attempts, nodes and sessions as transition tables, and which budget pays for a retry.

A transition that is not in its table is a bug of the scheduler and raises `IllegalTransition`; phases are decided
nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from fray.model.specs import EndReason, JobState, Phase


class JobPhase(StrEnum):
    """Phase of a job; `JobState`, which users see, has fewer values (see `LIVING_STATE` and `FINAL_STATE`)."""

    QUEUED = "queued"
    HELD = "held"
    """Not in the queue yet: its back-off has not expired, an earlier holder of its name is still being ended, or
    siblings that restart with it are (see `jobs.holds`). Or it waits with its job group, which is in the queue for it.
    """
    STARTING = "starting"
    """Placed; not every member has been seen running yet."""
    RUNNING = "running"
    CLOSING = "closing"
    """The end of the job, or of this generation, is decided; members are still being ended."""
    ENDED = "ended"


class AttemptPhase(StrEnum):
    """Phase of an attempt, as far as the scheduler was notified. In all but ENDED it holds its share of the machine."""

    RESERVED = "reserved"
    """Placed; its node is not asked to run it before the stage of its job starts (see `jobs.groups`)."""
    DESIRED = "desired"
    """Placed; its node has not reported it yet."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class NodePhase(StrEnum):
    ALIVE = "alive"
    SILENT = "silent"
    """No connection, for less than ``suspect_s``."""
    SUSPECT = "suspect"
    """Silent for ``suspect_s``: callers of its actors are notified; its attempts are not placed again yet."""
    LOST = "lost"
    """Silent for ``lease_s``: everything it held counts as ended."""


class SessionPhase(StrEnum):
    OPEN = "open"
    LOST = "lost"
    """The connection was lost; a driver has its grace period."""
    CLOSING = "closing"
    """Everything it owns is being ended."""
    ENDED = "ended"
    """Everything it owned has ended; remembered so that it can change nothing when it reconnects."""


# Jobs -----------------------------------------------------------------------------------------------------------------


class JobEvent(StrEnum):
    """Cause of a transition of a job."""

    HELD_BACK = "held back"
    """The job must wait for others or for a time before it may be placed."""
    RELEASED = "released"
    """The job waits for nothing but machines any more."""
    PLACED = "placed"
    """Every member has its machine."""
    ALL_RAN = "all ran"
    """Every member has been seen running."""
    ALL_SUCCEEDED = "all succeeded"
    CANCELLED = "cancelled"
    """A member ended without success, or the job is to stop."""
    RETRIED = "retried"
    """No member lives, and a budget pays for another generation."""
    COMMITTED = "committed"
    """The outcome is final."""


JOB_TABLE: Mapping[tuple[JobPhase, JobEvent], JobPhase] = {
    (JobPhase.QUEUED, JobEvent.PLACED): JobPhase.STARTING,
    # A waiting job ends without CLOSING: there are no processes whose end it has to wait for.
    (JobPhase.QUEUED, JobEvent.COMMITTED): JobPhase.ENDED,
    (JobPhase.QUEUED, JobEvent.HELD_BACK): JobPhase.HELD,
    (JobPhase.HELD, JobEvent.HELD_BACK): JobPhase.HELD,
    (JobPhase.HELD, JobEvent.RELEASED): JobPhase.QUEUED,
    (JobPhase.HELD, JobEvent.PLACED): JobPhase.STARTING,  # with its job group, which was in the queue for it
    (JobPhase.HELD, JobEvent.COMMITTED): JobPhase.ENDED,
    # A member that has succeeded counts as one that ran: even the shortest job passes RUNNING, and succeeds from there.
    (JobPhase.STARTING, JobEvent.ALL_RAN): JobPhase.RUNNING,
    (JobPhase.STARTING, JobEvent.CANCELLED): JobPhase.CLOSING,
    (JobPhase.RUNNING, JobEvent.ALL_SUCCEEDED): JobPhase.ENDED,
    (JobPhase.RUNNING, JobEvent.CANCELLED): JobPhase.CLOSING,
    # Only when no member lives (`transitions.retry_or_commit`): two generations of one job must not run side by side.
    (JobPhase.CLOSING, JobEvent.RETRIED): JobPhase.QUEUED,
    (JobPhase.CLOSING, JobEvent.COMMITTED): JobPhase.ENDED,
}

LIVING_STATE: Mapping[JobPhase, JobState] = {
    JobPhase.QUEUED: JobState.PENDING,
    JobPhase.HELD: JobState.PENDING,
    JobPhase.STARTING: JobState.PENDING,
    JobPhase.RUNNING: JobState.RUNNING,
    # Its processes still run, and a retry may follow. Users see an end only when it is final.
    JobPhase.CLOSING: JobState.RUNNING,
}
"""State that users see of a living job; an ended job shows `FINAL_STATE` of its cause."""

FINAL_STATE: Mapping[EndReason, JobState] = {
    EndReason.SUCCEEDED: JobState.SUCCEEDED,
    EndReason.STOPPED: JobState.STOPPED,
    EndReason.OWNER_ENDED: JobState.STOPPED,
    EndReason.FAILURE: JobState.FAILED,
    EndReason.KILLED: JobState.FAILED,
    EndReason.OUT_OF_MEMORY: JobState.FAILED,
    EndReason.ENVIRONMENT: JobState.FAILED,
    EndReason.PREEMPTED: JobState.FAILED,
    EndReason.MACHINE_LOST: JobState.FAILED,
    EndReason.GANG: JobState.FAILED,
    # Ended because another member failed: that member's error is reported, and one failure must not be reported twice.
    EndReason.SIBLING: JobState.STOPPED,
    EndReason.GROUP: JobState.STOPPED,
    EndReason.UNSCHEDULABLE: JobState.FAILED,
    EndReason.TIME_LIMIT: JobState.FAILED,
    EndReason.PORT_TAKEN: JobState.FAILED,
    EndReason.NO_ACCOUNT: JobState.FAILED,
}


# Attempts -------------------------------------------------------------------------------------------------------------


class AttemptObservation(StrEnum):
    """Observation of an attempt: by its node, by the loss of its node, or by the scheduler itself."""

    STARTING = Phase.STARTING.value
    RUNNING = Phase.RUNNING.value
    STOPPING = Phase.STOPPING.value
    ENDED = Phase.ENDED.value
    ABSENT = "absent"
    """The node, asked for everything it holds, did not list it."""
    LOST = "lost"
    """The machine is gone, by proof or by lease."""
    STAGE_REACHED = "stage reached"
    """The stage of its job has started."""
    WITHDRAWN = "withdrawn before start"
    """The attempt is to end, and its node was never asked to run it."""


_A = AttemptPhase
ATTEMPT_TABLE: Mapping[tuple[AttemptPhase, AttemptObservation], AttemptPhase] = {
    (_A.RESERVED, AttemptObservation.STARTING): _A.RESERVED,  # its node was not asked to run it: not believed
    (_A.RESERVED, AttemptObservation.RUNNING): _A.RESERVED,
    (_A.RESERVED, AttemptObservation.STOPPING): _A.RESERVED,
    (_A.RESERVED, AttemptObservation.ENDED): _A.RESERVED,
    (_A.RESERVED, AttemptObservation.ABSENT): _A.RESERVED,
    (_A.RESERVED, AttemptObservation.LOST): _A.ENDED,
    (_A.RESERVED, AttemptObservation.STAGE_REACHED): _A.DESIRED,
    (_A.RESERVED, AttemptObservation.WITHDRAWN): _A.ENDED,
    (_A.DESIRED, AttemptObservation.STARTING): _A.STARTING,
    (_A.DESIRED, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.DESIRED, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.DESIRED, AttemptObservation.ENDED): _A.ENDED,
    (_A.DESIRED, AttemptObservation.ABSENT): _A.DESIRED,  # the node has not received the request yet: sent again
    (_A.DESIRED, AttemptObservation.LOST): _A.ENDED,
    (_A.DESIRED, AttemptObservation.STAGE_REACHED): _A.DESIRED,
    (_A.DESIRED, AttemptObservation.WITHDRAWN): _A.DESIRED,  # its node was asked to run it, and reports the end
    (_A.STARTING, AttemptObservation.STARTING): _A.STARTING,
    (_A.STARTING, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.STARTING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.STARTING, AttemptObservation.ENDED): _A.ENDED,
    # The node had it and does not list it any more: no report of its end will follow.
    (_A.STARTING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.STARTING, AttemptObservation.LOST): _A.ENDED,
    (_A.STARTING, AttemptObservation.STAGE_REACHED): _A.STARTING,
    (_A.STARTING, AttemptObservation.WITHDRAWN): _A.STARTING,
    (_A.RUNNING, AttemptObservation.STARTING): _A.RUNNING,  # an old report
    (_A.RUNNING, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.RUNNING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.RUNNING, AttemptObservation.ENDED): _A.ENDED,
    (_A.RUNNING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.RUNNING, AttemptObservation.LOST): _A.ENDED,
    (_A.RUNNING, AttemptObservation.STAGE_REACHED): _A.RUNNING,
    (_A.RUNNING, AttemptObservation.WITHDRAWN): _A.RUNNING,
    (_A.STOPPING, AttemptObservation.STARTING): _A.STOPPING,  # an old report
    (_A.STOPPING, AttemptObservation.RUNNING): _A.STOPPING,  # an old report
    (_A.STOPPING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.STOPPING, AttemptObservation.ENDED): _A.ENDED,
    (_A.STOPPING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.STOPPING, AttemptObservation.LOST): _A.ENDED,
    (_A.STOPPING, AttemptObservation.STAGE_REACHED): _A.STOPPING,
    (_A.STOPPING, AttemptObservation.WITHDRAWN): _A.STOPPING,
}
"""An ended attempt has no row here: later reports of it change nothing."""

# Nodes ----------------------------------------------------------------------------------------------------------------


class NodeEvent(StrEnum):
    JOINED = "joined"
    LOST_CONNECTION = "lost connection"
    TIMED_OUT = "timed out"
    """The time limit of its phase has expired."""
    CONTROLLER_STARTED = "restarted"
    """The controller has restarted: every connection is lost and every timer starts again."""
    DIED = "died"
    """Proof of death; the node stays on record for its cordon or quarantine."""


_N = NodePhase
NODE_TABLE: Mapping[tuple[NodePhase, NodeEvent], NodePhase] = {
    # A node may connect again before the loss of its old connection is noticed.
    (_N.ALIVE, NodeEvent.JOINED): _N.ALIVE,
    (_N.ALIVE, NodeEvent.LOST_CONNECTION): _N.SILENT,
    (_N.ALIVE, NodeEvent.CONTROLLER_STARTED): _N.SILENT,
    (_N.SILENT, NodeEvent.JOINED): _N.ALIVE,
    (_N.SILENT, NodeEvent.LOST_CONNECTION): _N.SILENT,
    (_N.SILENT, NodeEvent.TIMED_OUT): _N.SUSPECT,
    (_N.SILENT, NodeEvent.CONTROLLER_STARTED): _N.SILENT,
    (_N.SUSPECT, NodeEvent.JOINED): _N.ALIVE,
    (_N.SUSPECT, NodeEvent.LOST_CONNECTION): _N.SUSPECT,
    (_N.SUSPECT, NodeEvent.TIMED_OUT): _N.LOST,
    # It could not report while there was no controller, so its silence is counted again from zero.
    (_N.SUSPECT, NodeEvent.CONTROLLER_STARTED): _N.SILENT,
    # The same process after a long cut. What it held was given up, and is ended as stray attempts before it takes work.
    (_N.LOST, NodeEvent.JOINED): _N.ALIVE,
    (_N.LOST, NodeEvent.LOST_CONNECTION): _N.LOST,
    (_N.LOST, NodeEvent.CONTROLLER_STARTED): _N.LOST,
    **{(phase, NodeEvent.DIED): _N.LOST for phase in NodePhase},
}
"""A lost node is forgotten after `SchedulerConfig.forget_node_s`."""

# Transitions ----------------------------------------------------------------------------------------------------------


class IllegalTransition(AssertionError):
    """A transition that is in no table: a bug of the scheduler, not of its users."""


P = TypeVar("P", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def next_phase(table: Mapping[tuple[P, T], P], phase: P, event: T) -> P:
    """Return the next phase.

    Raises:
        IllegalTransition: the table has no such transition.
    """
    try:
        return table[phase, event]
    except KeyError:
        raise IllegalTransition(f"{type(phase).__name__} {phase.value!r} has no transition {event.value!r}") from None


# Retries --------------------------------------------------------------------------------------------------------------


class Budget(StrEnum):
    """Account that pays for another generation."""

    FAILURE = "failure"
    PREEMPTION = "preemption"
    MACHINE_LOSS = "machine loss"
    OUT_OF_MEMORY = "out of memory"
    REQUEUE = "requeue"
    """Free: a person has requested that it waits again."""
    SIBLING = "sibling"
    """Free: the job restarts because a sibling does."""
    PORTS = "taken ports"
    """Free but bounded: processes that Fray does not manage hold ports the job was given, or other users have all
    accounts of the machine."""


BUDGETS: Mapping[EndReason, Budget | None] = {
    EndReason.SUCCEEDED: None,
    EndReason.FAILURE: Budget.FAILURE,
    EndReason.KILLED: Budget.FAILURE,
    EndReason.OUT_OF_MEMORY: Budget.OUT_OF_MEMORY,
    EndReason.ENVIRONMENT: None,
    EndReason.PREEMPTED: Budget.PREEMPTION,
    EndReason.MACHINE_LOST: Budget.MACHINE_LOSS,
    EndReason.STOPPED: None,
    EndReason.OWNER_ENDED: None,
    EndReason.GANG: Budget.FAILURE,
    EndReason.SIBLING: Budget.SIBLING,
    EndReason.GROUP: None,
    EndReason.UNSCHEDULABLE: None,
    EndReason.TIME_LIMIT: None,
    EndReason.PORT_TAKEN: Budget.PORTS,
    EndReason.NO_ACCOUNT: Budget.PORTS,
}
"""None: never retried. (GANG is never a job's first cause as long as nodes report correctly; a node that reports it
unasked has it counted as a failure.)"""

FALLBACK_BUDGET: Mapping[Budget, Budget] = {
    # A lost machine is not the job's fault, as a preemption is not. Lack of memory is, and would come again: by default
    # preemptions are retried 100 times, failures never.
    Budget.MACHINE_LOSS: Budget.PREEMPTION,
    Budget.OUT_OF_MEMORY: Budget.FAILURE,
}
"""Budget that pays in place of another that the job's author has not set."""

OWN_CAUSES = (EndReason.FAILURE, EndReason.KILLED, EndReason.OUT_OF_MEMORY, EndReason.GANG)
"""Causes that lead to back-off and count towards a crash loop; the loss or preemption of a machine calls for no wait.
"""

SUCCESS_OVERRIDES = (EndReason.PREEMPTED, EndReason.TIME_LIMIT)
"""Ends that the scheduler requests itself: a job whose members all succeed while they are being ended has succeeded."""

MACHINE_CAUSES = (EndReason.MACHINE_LOST, EndReason.PREEMPTED)
