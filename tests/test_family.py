"""What an ended child owes its scope."""

from __future__ import annotations

import pytest

from fray.model.specs import Cause
from fray.runtime.scope.children import (
    Child,
    Family,
    Kind,
    Supervision,
    owes_error,
)

ALL = set(Cause)


@pytest.mark.parametrize(
    ("kind", "peaceful"),
    [(Kind.JOB, {Cause.SUCCEEDED, Cause.GROUP}), (Kind.ACTOR, {Cause.SUCCEEDED, Cause.STOPPED, Cause.SIBLING})],
)
def test_a_child_that_ends_by_itself_owes_an_error_unless_its_end_is_peaceful(kind: Kind, peaceful: set[Cause]) -> None:
    child = Child("job", kind, Supervision.ESCALATE)
    assert {cause for cause in ALL if not owes_error(child, cause, ended_by_scope=False)} == peaceful


@pytest.mark.parametrize("cause", sorted(ALL))
def test_a_child_that_its_scope_ended_or_absorbs_owes_nothing(cause: Cause) -> None:
    assert not owes_error(Child("job", Kind.JOB, Supervision.ESCALATE), cause, ended_by_scope=True)
    assert not owes_error(Child("job", Kind.ACTOR, Supervision.ABSORB), cause, ended_by_scope=False)


def test_a_family_knows_its_living_by_kind() -> None:
    family = Family()
    family.join(Child("a", Kind.JOB, Supervision.ESCALATE))
    family.join(Child("b", Kind.ACTOR, Supervision.ABSORB))
    assert (family.living(Kind.JOB), family.living(Kind.ACTOR)) == (["a"], ["b"])
    family.leave("a")
    family.leave("a")
    assert family.living(Kind.JOB) == []
