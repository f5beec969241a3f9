"""Messages, frames and rows of this build, compared with those of the previous one (`tests.upgrade.wire_schema`)."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.upgrade.wire_schema import SNAPSHOT, problems, schema

Schema = dict[str, Any]


def test_this_build_works_with_the_previous_release() -> None:
    found = list(problems(json.loads(SNAPSHOT.read_text()), schema()))
    assert not found, "\n".join(found)


BASE: Schema = {
    "wire_versions": [1, 2],
    "capabilities": {"old": []},
    "frames": {"header": "<IBB", "kinds": {"HELLO": 1}},
    "calls": {"AGAIN": 4},
    "pickled": ["fray.api:Handle"],
    "messages": {"Launch": "Launch"},
    "store": {"version": 2, "rows": {"job": "JobRow"}},
    "types": {
        "Launch": {"name": "str", "band": 'Band = "batch"', "cpu": "int = 1"},
        "Band": ["batch", "production"],
        "JobRow": {"launch": "Launch"},
    },
}


def later(change: Callable[[Schema], object], *, raised: bool = True) -> Schema:
    new = copy.deepcopy(BASE)
    if raised:
        new["store"]["version"] = 3
    change(new)
    return new


def field(name: str, text: str) -> Callable[[Schema], object]:
    return lambda new: new["types"]["Launch"].update({name: text})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (field("gpu", "int"), "field Launch.gpu is new and has no default"),
        (field("cpu", "float = 1"), "field Launch.cpu was int and is float: add another field"),
        (field("cpu", "int = 2"), "default of Launch.cpu was 1 and is 2"),
        (lambda new: new["types"]["Launch"].pop("cpu"), "field Launch.cpu was removed or renamed"),
        (lambda new: new["types"]["Band"].append("debug"), "value Band.debug is new.*CAPABILITIES"),
        (lambda new: new["types"]["Band"].pop(), "value 'production' of Band was removed"),
        (lambda new: new["messages"].update(Stop="Stop"), "message Stop is new.*CAPABILITIES"),
        (lambda new: new["messages"].clear(), "message Launch was removed or renamed"),
        (lambda new: new["frames"]["kinds"].update(STOP=70), r"frame Kind\.STOP is new.*CAPABILITIES"),
        (lambda new: new["frames"]["kinds"].update(HELLO=2), "frames: kinds was .* never changes"),
        (lambda new: new["frames"].update(header="<Q"), "frames: header was <IBB and is <Q"),
        (lambda new: new["calls"].update(AGAIN=8), "calls: AGAIN was 4 and is 8"),
        (lambda new: new["pickled"].clear(), "fray.api:Handle was removed, renamed or moved"),
        (lambda new: new["capabilities"].clear(), "capability 'old' was removed"),
        (lambda new: new.update(wire_versions=[3, 4]), "WIRE_VERSIONS is 3 to 4 and the previous"),
    ],
)
def test_a_change_that_the_previous_release_cannot_read_is_named_with_what_to_do(
    change: Callable[[Schema], object], problem: str
) -> None:
    found = list(problems(BASE, later(change)))
    assert len(found) == 1, found
    assert re.match(problem, found[0]), found
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    "change",
    [
        field("gpu", "int = 0"),
        lambda new: (new["messages"].update(Stop="Stop"), new["capabilities"].update(new=["Stop"])),
        lambda new: (new["types"]["Band"].append("debug"), new["capabilities"].update(new=["Band.debug"])),
        lambda new: (new["frames"]["kinds"].update(STOP=70), new["capabilities"].update(new=["Kind.STOP"])),
        lambda new: new.update(wire_versions=[2, 3]),
    ],
)
def test_fields_with_defaults_and_what_a_capability_guards_may_be_added(change: Callable[[Schema], object]) -> None:
    assert not list(problems(BASE, later(change)))


def test_changed_rows_need_another_version_of_the_store() -> None:
    (found,) = problems(BASE, later(field("gpu", "int = 0"), raised=False))
    assert found.startswith("rows of the store have changed (job): raise SCHEMA_VERSION")
    assert not list(problems(BASE, BASE))
