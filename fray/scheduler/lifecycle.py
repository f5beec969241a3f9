"""Lifecycles as tables: what a job, an attempt and a node may become, and which budget pays for a retry.

A move that is not in its table is a mistake of the law and raises `IllegalTransition`; nothing else decides a phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from fray.model.specs import EndReason, JobState, Outcome, Phase
from fray.scheduler.state.rows import (
    AttemptPhase,
    AttemptRow,
    JobPhase,
    JobRow,
    NodePhase,
)

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


def job_state(job: JobRow) -> JobState:
    return FINAL_STATE[job.outcome.cause] if job.outcome else LIVING_STATE[job.phase]


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
SYMPTOMS = (EndReason.FAILURE, EndReason.KILLED, EndReason.GANG)
"""How the other members of a gang end when a machine is taken from under one of them."""


def first_cause(job: JobRow, members: list[AttemptRow], symptom_s: float) -> tuple[Outcome, int | None]:
    """What ended this generation of a CLOSING job, and which member: the first cause, not the loudest symptom.

    When a machine dies, the other members of its gang often fail within seconds, long before the silence proves the
    death. So a loss that began no later than ``symptom_s`` after the failure is taken for its cause. The ``ended_at``
    of a lost attempt is when its machine fell silent.
    """
    assert job.first_outcome is not None
    if job.first_outcome.cause in SYMPTOMS:
        for attempt in members:
            outcome, at = attempt.outcome, attempt.ended_at
            if (
                outcome
                and outcome.cause in MACHINE_CAUSES
                and at is not None
                and at <= job.first_outcome_at + symptom_s
            ):
                return outcome, attempt.member
    return job.first_outcome, job.first_member
