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
    CUT = "cut"
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
    (JobPhase.STARTING, JobEvent.CUT): JobPhase.CLOSING,
    (JobPhase.RUNNING, JobEvent.ALL_SUCCEEDED): JobPhase.ENDED,
    (JobPhase.RUNNING, JobEvent.CUT): JobPhase.CLOSING,
    (JobPhase.CLOSING, JobEvent.RETRIED): JobPhase.QUEUED,
    (JobPhase.CLOSING, JobEvent.COMMITTED): JobPhase.ENDED,
}

PUBLIC: Mapping[JobPhase, JobState] = {
    JobPhase.QUEUED: JobState.PENDING,
    JobPhase.HELD: JobState.PENDING,
    JobPhase.STARTING: JobState.PENDING,
    JobPhase.RUNNING: JobState.RUNNING,
    JobPhase.CLOSING: JobState.RUNNING,
}
"""What users see of a living job; an ended one shows `FINAL` of its cause."""

FINAL: Mapping[EndReason, JobState] = {
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
    return FINAL[job.outcome.cause] if job.outcome else PUBLIC[job.phase]


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
    DUE = "due"
    """The stage of its job has come."""
    CALLED_OFF = "called off"
    """It shall end, and has never been asked for."""


_A = AttemptPhase
ATTEMPT_TABLE: Mapping[tuple[AttemptPhase, AttemptObservation], AttemptPhase] = {
    (_A.KEPT, AttemptObservation.STARTING): _A.KEPT,  # nobody has asked for it: not believed
    (_A.KEPT, AttemptObservation.RUNNING): _A.KEPT,
    (_A.KEPT, AttemptObservation.STOPPING): _A.KEPT,
    (_A.KEPT, AttemptObservation.ENDED): _A.KEPT,
    (_A.KEPT, AttemptObservation.ABSENT): _A.KEPT,
    (_A.KEPT, AttemptObservation.LOST): _A.ENDED,
    (_A.KEPT, AttemptObservation.DUE): _A.WISHED,
    (_A.KEPT, AttemptObservation.CALLED_OFF): _A.ENDED,
    (_A.WISHED, AttemptObservation.STARTING): _A.STARTING,
    (_A.WISHED, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.WISHED, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.WISHED, AttemptObservation.ENDED): _A.ENDED,
    (_A.WISHED, AttemptObservation.ABSENT): _A.WISHED,  # it has not heard of it yet: wished again
    (_A.WISHED, AttemptObservation.LOST): _A.ENDED,
    (_A.WISHED, AttemptObservation.DUE): _A.WISHED,
    (_A.WISHED, AttemptObservation.CALLED_OFF): _A.WISHED,  # its node has been asked: it has the word
    (_A.STARTING, AttemptObservation.STARTING): _A.STARTING,
    (_A.STARTING, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.STARTING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.STARTING, AttemptObservation.ENDED): _A.ENDED,
    (_A.STARTING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.STARTING, AttemptObservation.LOST): _A.ENDED,
    (_A.STARTING, AttemptObservation.DUE): _A.STARTING,
    (_A.STARTING, AttemptObservation.CALLED_OFF): _A.STARTING,
    (_A.RUNNING, AttemptObservation.STARTING): _A.RUNNING,  # old news
    (_A.RUNNING, AttemptObservation.RUNNING): _A.RUNNING,
    (_A.RUNNING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.RUNNING, AttemptObservation.ENDED): _A.ENDED,
    (_A.RUNNING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.RUNNING, AttemptObservation.LOST): _A.ENDED,
    (_A.RUNNING, AttemptObservation.DUE): _A.RUNNING,
    (_A.RUNNING, AttemptObservation.CALLED_OFF): _A.RUNNING,
    (_A.STOPPING, AttemptObservation.STARTING): _A.STOPPING,  # old news
    (_A.STOPPING, AttemptObservation.RUNNING): _A.STOPPING,  # old news
    (_A.STOPPING, AttemptObservation.STOPPING): _A.STOPPING,
    (_A.STOPPING, AttemptObservation.ENDED): _A.ENDED,
    (_A.STOPPING, AttemptObservation.ABSENT): _A.ENDED,
    (_A.STOPPING, AttemptObservation.LOST): _A.ENDED,
    (_A.STOPPING, AttemptObservation.DUE): _A.STOPPING,
    (_A.STOPPING, AttemptObservation.CALLED_OFF): _A.STOPPING,
}
"""An ended attempt has no row here: whatever is said of it later changes nothing."""

# Nodes ---------------------------------------------------------------------------------------------------------------


class NodeEvent(StrEnum):
    JOINED = "joined"
    LOST_CONNECTION = "lost connection"
    DUE = "due"
    """The time of its phase is over."""
    RESTARTED = "restarted"
    """The controller has: every connection is gone and every timer starts again."""
    DIED = "died"
    """Proof; it stays on the list for what is to be remembered of it."""


_N = NodePhase
NODE_TABLE: Mapping[tuple[NodePhase, NodeEvent], NodePhase] = {
    (_N.ALIVE, NodeEvent.JOINED): _N.ALIVE,
    (_N.ALIVE, NodeEvent.LOST_CONNECTION): _N.SILENT,
    (_N.ALIVE, NodeEvent.RESTARTED): _N.SILENT,
    (_N.SILENT, NodeEvent.JOINED): _N.ALIVE,
    (_N.SILENT, NodeEvent.LOST_CONNECTION): _N.SILENT,
    (_N.SILENT, NodeEvent.DUE): _N.SUSPECT,
    (_N.SILENT, NodeEvent.RESTARTED): _N.SILENT,
    (_N.SUSPECT, NodeEvent.JOINED): _N.ALIVE,
    (_N.SUSPECT, NodeEvent.LOST_CONNECTION): _N.SUSPECT,
    (_N.SUSPECT, NodeEvent.DUE): _N.LOST,
    (_N.SUSPECT, NodeEvent.RESTARTED): _N.SILENT,
    (_N.LOST, NodeEvent.JOINED): _N.ALIVE,
    (_N.LOST, NodeEvent.LOST_CONNECTION): _N.LOST,
    (_N.LOST, NodeEvent.RESTARTED): _N.LOST,
    **{(phase, NodeEvent.DIED): _N.LOST for phase in NodePhase},
}
"""A lost node whose time is over (`Rules.forget_node_s`) is struck off the list."""

# Moves ---------------------------------------------------------------------------------------------------------------


class IllegalTransition(AssertionError):
    """A move that no table has: a mistake of the law, not of its users."""


P = TypeVar("P", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def next_phase(table: Mapping[tuple[P, T], P], phase: P, turn: T) -> P:
    """The next phase.

    Raises:
        IllegalTransition: the table has no such move.
    """
    try:
        return table[phase, turn]
    except KeyError:
        raise IllegalTransition(f"{type(phase).__name__} {phase.value!r} has no turn {turn.value!r}") from None


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

PAID_BY: Mapping[Budget, Budget] = {
    Budget.MACHINE_LOSS: Budget.PREEMPTION,
    Budget.OUT_OF_MEMORY: Budget.FAILURE,
}
"""Who pays in the place of a budget that the job's author has not set."""

OWN_DOING = (EndReason.FAILURE, EndReason.KILLED, EndReason.OUT_OF_MEMORY, EndReason.GANG)
"""What a back-off is for, and what a crash loop is made of; a machine that was lost or taken calls for no wait."""

DONE_ANYWAY = (EndReason.PREEMPTED, EndReason.TIME_LIMIT)
"""Ends that the law asks for itself: a job whose members all succeed while they are being ended has succeeded."""

MACHINES_DOING = (EndReason.MACHINE_LOST, EndReason.PREEMPTED)
SYMPTOMS = (EndReason.FAILURE, EndReason.KILLED, EndReason.GANG)
"""How the other members of a gang end when a machine is taken from under one of them."""


def first_cause(job: JobRow, members: list[AttemptRow], symptom_s: float) -> tuple[Outcome, int | None]:
    """What ended this generation of a CLOSING job, and which member: the first cause, not the loudest symptom.

    When a machine dies, the other members of its gang often fail within seconds, long before the silence proves the
    death. So a loss that began no later than ``symptom_s`` after the failure is taken for its cause. The ``ended_at``
    of a lost attempt is when its machine fell silent.
    """
    assert job.first is not None
    if job.first.cause in SYMPTOMS:
        for attempt in members:
            outcome, at = attempt.outcome, attempt.ended_at
            if outcome and outcome.cause in MACHINES_DOING and at is not None and at <= job.first_at + symptom_s:
                return outcome, attempt.member
    return job.first, job.first_member
