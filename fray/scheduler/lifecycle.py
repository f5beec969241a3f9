"""Lifecycles as tables: what a job, an attempt and a node may become, and which budget pays for a retry.

A move that is not in its table is a mistake of the law and raises `LawBroken`; nothing else decides a phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from fray.model.specs import Cause, JobState, Outcome, Phase
from fray.scheduler.state.rows import (
    Attempt,
    AttemptPhase,
    Job,
    JobPhase,
    NodePhase,
)

# Jobs ----------------------------------------------------------------------------------------------------------------


class JobTurn(StrEnum):
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


JOB_TABLE: Mapping[tuple[JobPhase, JobTurn], JobPhase] = {
    (JobPhase.QUEUED, JobTurn.PLACED): JobPhase.STARTING,
    (JobPhase.QUEUED, JobTurn.COMMITTED): JobPhase.ENDED,
    (JobPhase.QUEUED, JobTurn.HELD_BACK): JobPhase.HELD,
    (JobPhase.HELD, JobTurn.HELD_BACK): JobPhase.HELD,
    (JobPhase.HELD, JobTurn.RELEASED): JobPhase.QUEUED,
    (JobPhase.HELD, JobTurn.PLACED): JobPhase.STARTING,  # with its job group, which was in the queue for it
    (JobPhase.HELD, JobTurn.COMMITTED): JobPhase.ENDED,
    (JobPhase.STARTING, JobTurn.ALL_RAN): JobPhase.RUNNING,
    (JobPhase.STARTING, JobTurn.CUT): JobPhase.CLOSING,
    (JobPhase.RUNNING, JobTurn.ALL_SUCCEEDED): JobPhase.ENDED,
    (JobPhase.RUNNING, JobTurn.CUT): JobPhase.CLOSING,
    (JobPhase.CLOSING, JobTurn.RETRIED): JobPhase.QUEUED,
    (JobPhase.CLOSING, JobTurn.COMMITTED): JobPhase.ENDED,
}

PUBLIC: Mapping[JobPhase, JobState] = {
    JobPhase.QUEUED: JobState.PENDING,
    JobPhase.HELD: JobState.PENDING,
    JobPhase.STARTING: JobState.PENDING,
    JobPhase.RUNNING: JobState.RUNNING,
    JobPhase.CLOSING: JobState.RUNNING,
}
"""What users see of a living job; an ended one shows `FINAL` of its cause."""

FINAL: Mapping[Cause, JobState] = {
    Cause.SUCCEEDED: JobState.SUCCEEDED,
    Cause.STOPPED: JobState.STOPPED,
    Cause.OWNER_ENDED: JobState.STOPPED,
    Cause.FAILURE: JobState.FAILED,
    Cause.KILLED: JobState.FAILED,
    Cause.OUT_OF_MEMORY: JobState.FAILED,
    Cause.ENVIRONMENT: JobState.FAILED,
    Cause.PREEMPTED: JobState.FAILED,
    Cause.MACHINE_LOST: JobState.FAILED,
    Cause.GANG: JobState.FAILED,
    Cause.SIBLING: JobState.STOPPED,
    Cause.GROUP: JobState.STOPPED,
    Cause.UNSCHEDULABLE: JobState.FAILED,
    Cause.TIME_LIMIT: JobState.FAILED,
    Cause.PORT_TAKEN: JobState.FAILED,
}


def job_state(job: Job) -> JobState:
    return FINAL[job.outcome.cause] if job.outcome else PUBLIC[job.phase]


# Attempts ------------------------------------------------------------------------------------------------------------


class Sight(StrEnum):
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
ATTEMPT_TABLE: Mapping[tuple[AttemptPhase, Sight], AttemptPhase] = {
    (_A.KEPT, Sight.STARTING): _A.KEPT,  # nobody has asked for it: not believed
    (_A.KEPT, Sight.RUNNING): _A.KEPT,
    (_A.KEPT, Sight.STOPPING): _A.KEPT,
    (_A.KEPT, Sight.ENDED): _A.KEPT,
    (_A.KEPT, Sight.ABSENT): _A.KEPT,
    (_A.KEPT, Sight.LOST): _A.ENDED,
    (_A.KEPT, Sight.DUE): _A.WISHED,
    (_A.KEPT, Sight.CALLED_OFF): _A.ENDED,
    (_A.WISHED, Sight.STARTING): _A.STARTING,
    (_A.WISHED, Sight.RUNNING): _A.RUNNING,
    (_A.WISHED, Sight.STOPPING): _A.STOPPING,
    (_A.WISHED, Sight.ENDED): _A.ENDED,
    (_A.WISHED, Sight.ABSENT): _A.WISHED,  # it has not heard of it yet: wished again
    (_A.WISHED, Sight.LOST): _A.ENDED,
    (_A.WISHED, Sight.DUE): _A.WISHED,
    (_A.WISHED, Sight.CALLED_OFF): _A.WISHED,  # its node has been asked: it has the word
    (_A.STARTING, Sight.STARTING): _A.STARTING,
    (_A.STARTING, Sight.RUNNING): _A.RUNNING,
    (_A.STARTING, Sight.STOPPING): _A.STOPPING,
    (_A.STARTING, Sight.ENDED): _A.ENDED,
    (_A.STARTING, Sight.ABSENT): _A.ENDED,
    (_A.STARTING, Sight.LOST): _A.ENDED,
    (_A.STARTING, Sight.DUE): _A.STARTING,
    (_A.STARTING, Sight.CALLED_OFF): _A.STARTING,
    (_A.RUNNING, Sight.STARTING): _A.RUNNING,  # old news
    (_A.RUNNING, Sight.RUNNING): _A.RUNNING,
    (_A.RUNNING, Sight.STOPPING): _A.STOPPING,
    (_A.RUNNING, Sight.ENDED): _A.ENDED,
    (_A.RUNNING, Sight.ABSENT): _A.ENDED,
    (_A.RUNNING, Sight.LOST): _A.ENDED,
    (_A.RUNNING, Sight.DUE): _A.RUNNING,
    (_A.RUNNING, Sight.CALLED_OFF): _A.RUNNING,
    (_A.STOPPING, Sight.STARTING): _A.STOPPING,  # old news
    (_A.STOPPING, Sight.RUNNING): _A.STOPPING,  # old news
    (_A.STOPPING, Sight.STOPPING): _A.STOPPING,
    (_A.STOPPING, Sight.ENDED): _A.ENDED,
    (_A.STOPPING, Sight.ABSENT): _A.ENDED,
    (_A.STOPPING, Sight.LOST): _A.ENDED,
    (_A.STOPPING, Sight.DUE): _A.STOPPING,
    (_A.STOPPING, Sight.CALLED_OFF): _A.STOPPING,
}
"""An ended attempt has no row here: whatever is said of it later changes nothing."""

# Nodes ---------------------------------------------------------------------------------------------------------------


class NodeTurn(StrEnum):
    JOINED = "joined"
    LOST_CONNECTION = "lost connection"
    DUE = "due"
    """The time of its phase is over."""
    RESTARTED = "restarted"
    """The controller has: every connection is gone and every timer starts again."""
    DIED = "died"
    """Proof; it stays on the list for what is to be remembered of it."""


_N = NodePhase
NODE_TABLE: Mapping[tuple[NodePhase, NodeTurn], NodePhase] = {
    (_N.ALIVE, NodeTurn.JOINED): _N.ALIVE,
    (_N.ALIVE, NodeTurn.LOST_CONNECTION): _N.SILENT,
    (_N.ALIVE, NodeTurn.RESTARTED): _N.SILENT,
    (_N.SILENT, NodeTurn.JOINED): _N.ALIVE,
    (_N.SILENT, NodeTurn.LOST_CONNECTION): _N.SILENT,
    (_N.SILENT, NodeTurn.DUE): _N.SUSPECT,
    (_N.SILENT, NodeTurn.RESTARTED): _N.SILENT,
    (_N.SUSPECT, NodeTurn.JOINED): _N.ALIVE,
    (_N.SUSPECT, NodeTurn.LOST_CONNECTION): _N.SUSPECT,
    (_N.SUSPECT, NodeTurn.DUE): _N.LOST,
    (_N.SUSPECT, NodeTurn.RESTARTED): _N.SILENT,
    (_N.LOST, NodeTurn.JOINED): _N.ALIVE,
    (_N.LOST, NodeTurn.LOST_CONNECTION): _N.LOST,
    (_N.LOST, NodeTurn.RESTARTED): _N.LOST,
    **{(phase, NodeTurn.DIED): _N.LOST for phase in NodePhase},
}
"""A lost node whose time is over (`Rules.forget_node_s`) is struck off the list."""

# Moves ---------------------------------------------------------------------------------------------------------------


class LawBroken(AssertionError):
    """A move that no table has: a mistake of the law, not of its users."""


P = TypeVar("P", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def moved(table: Mapping[tuple[P, T], P], phase: P, turn: T) -> P:
    """The next phase.

    Raises:
        LawBroken: the table has no such move.
    """
    try:
        return table[phase, turn]
    except KeyError:
        raise LawBroken(f"{type(phase).__name__} {phase.value!r} has no turn {turn.value!r}") from None


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


BUDGETS: Mapping[Cause, Budget | None] = {
    Cause.SUCCEEDED: None,
    Cause.FAILURE: Budget.FAILURE,
    Cause.KILLED: Budget.FAILURE,
    Cause.OUT_OF_MEMORY: Budget.OUT_OF_MEMORY,
    Cause.ENVIRONMENT: None,
    Cause.PREEMPTED: Budget.PREEMPTION,
    Cause.MACHINE_LOST: Budget.MACHINE_LOSS,
    Cause.STOPPED: None,
    Cause.OWNER_ENDED: None,
    Cause.GANG: Budget.FAILURE,
    Cause.SIBLING: Budget.SIBLING,
    Cause.GROUP: None,
    Cause.UNSCHEDULABLE: None,
    Cause.TIME_LIMIT: None,
    Cause.PORT_TAKEN: Budget.PORTS,
}
"""None: never retried. (GANG is never a job's first cause as long as nodes tell the truth; should one claim it
unasked, it counts as a failure.)"""

PAID_BY: Mapping[Budget, Budget] = {
    Budget.MACHINE_LOSS: Budget.PREEMPTION,
    Budget.OUT_OF_MEMORY: Budget.FAILURE,
}
"""Who pays in the place of a budget that the job's author has not set."""

OWN_DOING = (Cause.FAILURE, Cause.KILLED, Cause.OUT_OF_MEMORY, Cause.GANG)
"""What a back-off is for, and what a crash loop is made of; a machine that was lost or taken calls for no wait."""

DONE_ANYWAY = (Cause.PREEMPTED, Cause.TIME_LIMIT)
"""Ends that the law asks for itself: a job whose members all succeed while they are being ended has succeeded."""

MACHINES_DOING = (Cause.MACHINE_LOST, Cause.PREEMPTED)
SYMPTOMS = (Cause.FAILURE, Cause.KILLED, Cause.GANG)
"""How the other members of a gang end when a machine is taken from under one of them."""


def first_cause(job: Job, members: list[Attempt], symptom_s: float) -> tuple[Outcome, int | None]:
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
