"""Errors that ended children raise in their scope."""

from __future__ import annotations

import pytest

from fray.model.specs import EndReason
from fray.runtime.scope.children import (
    ChildKind,
    ChildTable,
    OnChildFailure,
    ScopeChild,
    owes_error,
)

ALL = set(EndReason)


@pytest.mark.parametrize(
    ("kind", "peaceful"),
    [
        (ChildKind.JOB, {EndReason.SUCCEEDED, EndReason.GROUP}),
        (ChildKind.ACTOR, {EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.SIBLING}),
    ],
)
def test_a_child_that_ends_by_itself_owes_an_error_unless_its_end_is_peaceful(
    kind: ChildKind, peaceful: set[EndReason]
) -> None:
    child = ScopeChild("job", kind, OnChildFailure.ESCALATE)
    assert {cause for cause in ALL if not owes_error(child, cause, ended_by_scope=False)} == peaceful


@pytest.mark.parametrize("cause", sorted(ALL))
def test_a_child_that_its_scope_ended_or_absorbs_owes_nothing(cause: EndReason) -> None:
    assert not owes_error(ScopeChild("job", ChildKind.JOB, OnChildFailure.ESCALATE), cause, ended_by_scope=True)
    assert not owes_error(ScopeChild("job", ChildKind.ACTOR, OnChildFailure.ABSORB), cause, ended_by_scope=False)


def test_a_table_lists_living_children_by_kind() -> None:
    family = ChildTable()
    family.add(ScopeChild("a", ChildKind.JOB, OnChildFailure.ESCALATE))
    family.add(ScopeChild("b", ChildKind.ACTOR, OnChildFailure.ABSORB))
    assert (family.living(ChildKind.JOB), family.living(ChildKind.ACTOR)) == (["a"], ["b"])
    family.remove("a")
    family.remove("a")
    assert family.living(ChildKind.JOB) == []
