"""Whose child is alive, what an ended child owes its scope. Pure; `fray.runtime.scope.scope` obeys.

The law: a scope's exit waits for its jobs, then ends its actors; an error or a cancellation ends both; a child that
fails on its own account owes its scope an error, a child that the scope itself ended owes nothing.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, define, frozen

from fray.model.ids import JobId
from fray.model.specs import Cause


class Kind(StrEnum):
    JOB = "job"
    """Leaving the scope waits for it."""
    ACTOR = "actor"
    """Leaving the scope ends it, once the jobs are done."""


class Supervision(StrEnum):
    """What the failure of a child does to its scope."""

    ESCALATE = "escalate"
    """It fails the scope: siblings are cancelled and the error comes out of the ``async with``."""
    ABSORB = "absorb"
    """It is the waiters' business only."""


@frozen
class Child:
    job_id: JobId
    kind: Kind
    supervision: Supervision


# (kind, cause) that end a child in order when nobody of its scope asked for its end. After SIBLING it is the sibling
# that failed which owes the error; so it is after GROUP.
_PEACEFUL: dict[Kind, frozenset[Cause]] = {
    Kind.JOB: frozenset({Cause.SUCCEEDED, Cause.GROUP}),
    Kind.ACTOR: frozenset({Cause.SUCCEEDED, Cause.STOPPED, Cause.SIBLING}),
}


def owes_error(child: Child, cause: Cause, ended_by_scope: bool) -> bool:
    """Whether the end of ``child`` by ``cause`` is an error its scope must raise."""
    if ended_by_scope or child.supervision is Supervision.ABSORB:
        return False
    return cause not in _PEACEFUL[child.kind]


@define
class Family:
    """The living children of one scope."""

    children: dict[JobId, Child] = Factory(dict)
    ending: bool = False
    """The scope is ending its children; none may join any more."""

    def join(self, child: Child) -> None:
        self.children[child.job_id] = child

    def leave(self, job_id: JobId) -> None:
        self.children.pop(job_id, None)

    def living(self, kind: Kind) -> list[JobId]:
        return [child.job_id for child in self.children.values() if child.kind is kind]
