"""Table of a scope's living children, and which ends of them are errors of the scope. Pure.

Contract, carried out by `fray.runtime.scope.scope`: leaving a scope waits for its jobs, then ends its actors; an error
or a cancellation ends both. A child that fails on its own raises an error in its scope; a child that the scope itself
ended does not.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, define, frozen

from fray.model.ids import JobId
from fray.model.specs import EndReason


class ChildKind(StrEnum):
    JOB = "job"
    """Child that leaving the scope waits for."""
    ACTOR = "actor"
    """Child that leaving the scope ends, once the jobs are done."""


class OnChildFailure(StrEnum):
    """Effect of a child's failure on its scope."""

    ESCALATE = "escalate"
    """Fail the scope: siblings are cancelled and the error is raised out of the ``async with``."""
    ABSORB = "absorb"
    """Raise the error in the waiters of the child only."""


@frozen
class ScopeChild:
    job_id: JobId
    kind: ChildKind
    supervision: OnChildFailure


# Causes of an orderly end that the scope did not request, by kind. After SIBLING and GROUP the error is raised once, by
# the sibling or member that failed first.
_ORDERLY_CAUSES: dict[ChildKind, frozenset[EndReason]] = {
    ChildKind.JOB: frozenset({EndReason.SUCCEEDED, EndReason.GROUP}),
    ChildKind.ACTOR: frozenset({EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.SIBLING}),
}


def owes_error(child: ScopeChild, cause: EndReason, ended_by_scope: bool) -> bool:
    """Return whether the end of ``child`` by ``cause`` is an error its scope must raise."""
    # An end that the scope itself asked for is not news to it.
    if ended_by_scope or child.supervision is OnChildFailure.ABSORB:
        return False
    return cause not in _ORDERLY_CAUSES[child.kind]


@define
class ChildTable:
    """Living children of one scope."""

    children: dict[JobId, ScopeChild] = Factory(dict)
    ending: bool = False
    """Flag: the scope is ending its children, and no more may be launched."""

    def add(self, child: ScopeChild) -> None:
        self.children[child.job_id] = child

    def remove(self, job_id: JobId) -> None:
        self.children.pop(job_id, None)

    def living(self, kind: ChildKind) -> list[JobId]:
        return [child.job_id for child in self.children.values() if child.kind is kind]
