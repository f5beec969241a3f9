"""Lifecycles as tables: what a job, an attempt and a node may become, and which budget pays for a retry.

A move that is not in its table is a mistake of the law and raises `IllegalTransition`; nothing else decides a phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from fray.model.specs import EndReason, JobState, Phase


class JobPhase(StrEnum):
    """Where a job is; `JobState` is the same with fewer words (see `lifecycle.PUBLIC`)."""

    QUEUED = "queued"
    HELD = "held"
    """Not in the queue yet: its back-off is not over, an earlier holder of its name is still being ended, or siblings
    with which it begins anew are (see `holding`). Or it waits with its job group, which is in the queue for it."""
    STARTING = "starting"
    """Placed; not every member has been seen running yet."""
    RUNNING = "running"
    CLOSING = "closing"
    """Its end (or the end of this generation) is decided; members are still being ended."""
    ENDED = "ended"


class AttemptPhase(StrEnum):
    """Where an attempt is, as far as the law knows. All but ENDED hold their share of the machine."""

    RESERVED = "kept"
    """Placed; its node is not asked for it before the stage of its job has come (see `job_groups`)."""
    DESIRED = "wished"
    """Placed; its node has not spoken of it yet."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class NodePhase(StrEnum):
    ALIVE = "alive"
    SILENT = "silent"
    """No connection, for less than ``suspect_s``."""
    SUSPECT = "suspect"
    """Silent for ``suspect_s``: its actors' callers are told, its attempts are not placed again yet."""
    LOST = "lost"
    """Silent for ``lease_s``: all it held counts as ended."""


class SessionPhase(StrEnum):
    OPEN = "open"
    LOST = "lost"
    """The connection is gone; a driver has its grace."""
    CLOSING = "closing"
    """All it owns is being ended."""
    ENDED = "ended"
    """Nothing of it is left; remembered so that it can change nothing when it comes back."""


# Jobs ----------------------------------------------------------------------------------------------------------------


class JobEvent(StrEnum):
    """What can happen to a job."""

    HELD_BACK = "held back"
    """Something must happen, or time must pass, before it may be placed."""
    RELEASED = "released"
    """That is over."""
    PLACED = "placed"
    """Every member has its machine."""
    ALL_RAN = "all ran"
    """Every member has been seen running."""
    ALL_SUCCEEDED = "all succeeded"
    CANCELLED = "cut"
    """A member ended without success, or the job shall stop."""
    RETRIED = "retried"
    """No member lives, and a budget pays for another generation."""
    COMMITTED = "committed"
    """The outcome is settled."""


JOB_TABLE: Mapping[tuple[JobPhase, JobEvent], JobPhase] = {
    (JobPhase.QUEUED, JobEvent.PLACED): JobPhase.STARTING,
    (JobPhase.QUEUED, JobEvent.COMMITTED): JobPhase.ENDED,
    (JobPhase.QUEUED, JobEvent.HELD_BACK): JobPhase.HELD,
    (JobPhase.HELD, JobEvent.HELD_BACK): JobPhase.HELD,
    (JobPhase.HELD, JobEvent.RELEASED): JobPhase.QUEUED,
    (JobPhase.HELD, JobEvent.PLACED): JobPhase.STARTING,  # with its job group, which was in the queue for it
    (JobPhase.HELD, JobEvent.COMMITTED): JobPhase.ENDED,
    (JobPhase.STARTING, JobEvent.ALL_RAN): JobPhase.RUNNING,
    (JobPhase.STARTING, JobEvent.CANCELLED): JobPhase.CLOSING,
    (JobPhase.RUNNING, JobEvent.ALL_SUCCEEDED): JobPhase.ENDED,
    (JobPhase.RUNNING, JobEvent.CANCELLED): JobPhase.CLOSING,
    (JobPhase.CLOSING, JobEvent.RETRIED): JobPhase.QUEUED,
    (JobPhase.CLOSING, JobEvent.COMMITTED): JobPhase.ENDED,
}

LIVING_STATE: Mapping[JobPhase, JobState] = {
    JobPhase.QUEUED: JobState.PENDING,
    JobPhase.HELD: JobState.PENDING,
    JobPhase.STARTING: JobState.PENDING,
    JobPhase.RUNNING: JobState.RUNNING,
    JobPhase.CLOSING: JobState.RUNNING,
}
"""What users see of a living job; an ended one shows `FINAL` of its cause."""

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
    EndReason.SIBLING: JobState.STOPPED,
    EndReason.GROUP: JobState.STOPPED,
    EndReason.UNSCHEDULABLE: JobState.FAILED,
    EndReason.TIME_LIMIT: JobState.FAILED,
    EndReason.PORT_TAKEN: JobState.FAILED,
}


# Attempts ------------------------------------------------------------------------------------------------------------


class AttemptObservation(StrEnum):
    """What is learnt of an attempt."""

    STARTING = Phase.STARTING.value
    RUNNING = Phase.RUNNING.value
    STOPPING = Phase.STOPPING.value
    ENDED = Phase.ENDED.value
    ABSENT = "absent"
    """Its node, asked for everything it holds, did not name it."""
    LOST = "lost"
    """Its machine is gone, by proof or by lease."""
    STAGE_REACHED = "due"
    """The stage of its job has come."""
    WITHDRAWN = "called off"
    """It shall end, and has never been asked for."""


_A = AttemptPhase
ATTEMPT_TABLE: Mapping[tuple[AttemptPhase, AttemptObservation], AttemptPhase] = {
    (_A.RESERVED, AttemptObservation.STARTING): _A.RESERVED,  # nobody has asked for it: not believed
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
    (_A.DESIRED, AttemptObservation.ABSENT): _A.DESIRED,  # it has not heard of it yet: wished again
    (_A.DESIRED, AttemptObservation.LOST): _A.ENDED,
    (_A.DESIRED, AttemptObservation.STAGE_REACHED): _A.DESIRED,
    (_A.DESIRED, AttemptObservation.WITHDRAWN): _A.DESIRED,  # its node has been asked: it has the word
    (_A.STARTING, AttemptObservation.STARTING): _A.STARTING,
    (_A.STARTING, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.STARTING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.STARTING, AttemptObservation.ENDED): _A.ENDED,
    (_A.STARTING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.STARTING, AttemptObservation.LOST): _A.ENDED,
    (_A.STARTING, AttemptObservation.STAGE_REACHED): _A.STARTING,
    (_A.STARTING, AttemptObservation.WITHDRAWN): _A.STARTING,
    (_A.RUNNING, AttemptObservation.STARTING): _A.RUNNING,  # old news
    (_A.RUNNING, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.RUNNING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.RUNNING, AttemptObservation.ENDED): _A.ENDED,
    (_A.RUNNING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.RUNNING, AttemptObservation.LOST): _A.ENDED,
    (_A.RUNNING, AttemptObservation.STAGE_REACHED): _A.RUNNING,
    (_A.RUNNING, AttemptObservation.WITHDRAWN): _A.RUNNING,
    (_A.STOPPING, AttemptObservation.STARTING): _A.STOPPING,  # old news
    (_A.STOPPING, AttemptObservation.RUNNING): _A.STOPPING,  # old news
    (_A.STOPPING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.STOPPING, AttemptObservation.ENDED): _A.ENDED,
    (_A.STOPPING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.STOPPING, AttemptObservation.LOST): _A.ENDED,
    (_A.STOPPING, AttemptObservation.STAGE_REACHED): _A.STOPPING,
    (_A.STOPPING, AttemptObservation.WITHDRAWN): _A.STOPPING,
}
"""An ended attempt has no row here: whatever is said of it later changes nothing."""

# Nodes ---------------------------------------------------------------------------------------------------------------


class NodeEvent(StrEnum):
    JOINED = "joined"
    LOST_CONNECTION = "lost connection"
    TIMED_OUT = "due"
    """The time of its phase is over."""
    CONTROLLER_STARTED = "restarted"
    """The controller has: every connection is gone and every timer starts again."""
    DIED = "died"
    """Proof; it stays on the list for what is to be remembered of it."""


_N = NodePhase
NODE_TABLE: Mapping[tuple[NodePhase, NodeEvent], NodePhase] = {
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
    (_N.SUSPECT, NodeEvent.CONTROLLER_STARTED): _N.SILENT,
    (_N.LOST, NodeEvent.JOINED): _N.ALIVE,
    (_N.LOST, NodeEvent.LOST_CONNECTION): _N.LOST,
    (_N.LOST, NodeEvent.CONTROLLER_STARTED): _N.LOST,
    **{(phase, NodeEvent.DIED): _N.LOST for phase in NodePhase},
}
"""A lost node whose time is over (`Rules.forget_node_s`) is struck off the list."""

# Moves ---------------------------------------------------------------------------------------------------------------


class IllegalTransition(AssertionError):
    """A move that no table has: a mistake of the law, not of its users."""


P = TypeVar("P", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def next_phase(table: Mapping[tuple[P, T], P], phase: P, event: T) -> P:
    """The next phase.

    Raises:
        IllegalTransition: the table has no such move.
    """
    try:
        return table[phase, event]
    except KeyError:
        raise IllegalTransition(f"{type(phase).__name__} {phase.value!r} has no turn {event.value!r}") from None


# Retries -------------------------------------------------------------------------------------------------------------


class Budget(StrEnum):
    """Who pays for another generation."""

    FAILURE = "failure"
    PREEMPTION = "preemption"
    MACHINE_LOSS = "machine loss"
    OUT_OF_MEMORY = "out of memory"
    SIBLING = "sibling"
    """Nobody's: it is made anew because another one was."""
    PORTS = "taken ports"
    """Nobody's, but bounded: strangers hold ports it was given."""


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
}
"""None: never retried. (GANG is never a job's first cause as long as nodes tell the truth; should one claim it
unasked, it counts as a failure.)"""

FALLBACK_BUDGET: Mapping[Budget, Budget] = {
    Budget.MACHINE_LOSS: Budget.PREEMPTION,
    Budget.OUT_OF_MEMORY: Budget.FAILURE,
}
"""Who pays in the place of a budget that the job's author has not set."""

OWN_CAUSES = (EndReason.FAILURE, EndReason.KILLED, EndReason.OUT_OF_MEMORY, EndReason.GANG)
"""What a back-off is for, and what a crash loop is made of; a machine that was lost or taken calls for no wait."""

SUCCESS_OVERRIDES = (EndReason.PREEMPTED, EndReason.TIME_LIMIT)
"""Ends that the law asks for itself: a job whose members all succeed while they are being ended has succeeded."""

MACHINE_CAUSES = (EndReason.MACHINE_LOST, EndReason.PREEMPTED)
