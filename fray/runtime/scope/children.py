"""Whose child is alive, what an ended child owes its scope. Pure; `fray.runtime.scope.scope` obeys.

The law: a scope's exit waits for its jobs, then ends its actors; an error or a cancellation ends both; a child that
fails on its own account owes its scope an error, a child that the scope itself ended owes nothing.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, define, frozen

from fray.model.ids import JobId
from fray.model.specs import EndReason


class ChildKind(StrEnum):
    JOB = "job"
    """Leaving the scope waits for it."""
    ACTOR = "actor"
    """Leaving the scope ends it, once the jobs are done."""


class OnChildFailure(StrEnum):
    """What the failure of a child does to its scope."""

    ESCALATE = "escalate"
    """It fails the scope: siblings are cancelled and the error comes out of the ``async with``."""
    ABSORB = "absorb"
    """It is the waiters' business only."""


@frozen
class ScopeChild:
    job_id: JobId
    kind: ChildKind
    supervision: OnChildFailure


# (kind, cause) that end a child in order when nobody of its scope asked for its end. After SIBLING it is the sibling
# that failed which owes the error; so it is after GROUP.
_PEACEFUL: dict[ChildKind, frozenset[EndReason]] = {
    ChildKind.JOB: frozenset({EndReason.SUCCEEDED, EndReason.GROUP}),
    ChildKind.ACTOR: frozenset({EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.SIBLING}),
}


def owes_error(child: ScopeChild, cause: EndReason, ended_by_scope: bool) -> bool:
    """Whether the end of ``child`` by ``cause`` is an error its scope must raise."""
    if ended_by_scope or child.supervision is OnChildFailure.ABSORB:
        return False
    return cause not in _PEACEFUL[child.kind]


@define
class ChildTable:
    """The living children of one scope."""

    children: dict[JobId, ScopeChild] = Factory(dict)
    ending: bool = False
    """The scope is ending its children; none may join any more."""

    def add(self, child: ScopeChild) -> None:
        self.children[child.job_id] = child

    def remove(self, job_id: JobId) -> None:
        self.children.pop(job_id, None)

    def living(self, kind: ChildKind) -> list[JobId]:
        return [child.job_id for child in self.children.values() if child.kind is kind]
