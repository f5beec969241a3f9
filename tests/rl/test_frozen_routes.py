"""Routes of servers while weights are synced: with ``freeze_for_weight_sync``, new requests wait for the newest."""

from __future__ import annotations

from typing import Any

import pytest

from fray.rl.controller import RunController
from fray.rl.core.server_states import ServerRecord, ServerState
from fray.rl.core.versions import VersionName
from tests.rl.test_run import run

OLD, NEW = VersionName(0, 1), VersionName(0, 2)


def accepting(freezes: bool, *, version: VersionName, is_published: bool, state: str = "healthy") -> tuple[bool, bool]:
    """Return whether a server gets new requests, and whether it keeps those that it has if it gets none."""
    nothing: Any = None
    controller = RunController(nothing, run(freeze_for_weight_sync=freezes).parts, nothing)
    controller._target = NEW
    if is_published:
        controller._weights.add(NEW, None, (NEW, NEW))
    server = ServerRecord("server-0", 1, state=ServerState(state), version=version)
    controller._handles["server-0"] = nothing
    route = controller._route(server)
    return route.accepts, route.leaves


@pytest.mark.parametrize(
    ("freezes", "version", "is_published", "expected"),
    [
        (False, OLD, True, (True, False)),
        (True, NEW, True, (True, False)),
        (True, OLD, True, (False, True)),
        # The trainer has not published them yet: nothing waits for that.
        (True, OLD, False, (True, False)),
    ],
)
def test_a_server_with_old_weights_gets_no_new_requests_and_answers_those_it_has(
    freezes: bool, version: VersionName, is_published: bool, expected: tuple[bool, bool]
) -> None:
    assert accepting(freezes, version=version, is_published=is_published) == expected


def test_a_silent_or_leaving_server_is_as_it_would_be_without() -> None:
    for state in ("suspect", "leaving"):
        found = [accepting(one, version=OLD, is_published=True, state=state) for one in (False, True)]
        assert found == [(False, state == "leaving")] * 2
