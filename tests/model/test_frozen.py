"""Words are as attrs would have made them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.model.frozen import frozen


def build(frozen: Any) -> Any:
    @frozen(kw_only=True)
    class Word:
        a: int = 0
        b: tuple[str, ...] = ()
        secret: str = attrs.field(default="", repr=False)
        note: int = attrs.field(default=0, eq=False)

    return Word


OURS, THEIRS = build(frozen), build(attrs.frozen)
FIELDS = st.fixed_dictionaries(
    {"a": st.integers(0, 1), "b": st.sampled_from([(), ("x",)]), "secret": st.sampled_from("st"), "note": st.integers()}
)


@given(FIELDS, FIELDS)
def test_equality_hash_and_repr_are_those_of_attrs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (OURS(**one) == OURS(**other)) == (THEIRS(**one) == THEIRS(**other))
    assert repr(OURS(**one)) == repr(THEIRS(**one))
    if OURS(**one) == OURS(**other):
        assert hash(OURS(**one)) == hash(OURS(**other))


def test_instances_of_different_classes_differ_and_none_can_be_changed() -> None:
    assert OURS() != THEIRS()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        OURS().a = 1
    assert attrs.evolve(OURS(), a=2).a == 2
