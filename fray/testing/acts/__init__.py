"""What the drivers of a story do, by name: a few operations on the public API each, with what must be true of them.

An act returns what came of it in a few words. Errors that a fault explains may end it; `fray.testing.sim` sorts them.
Each module here has a table ``ACTS`` of its own; a new act is a line there, and one in `fray.testing.strategies.ACTS`,
which says how often it is tried.
"""

from __future__ import annotations

from collections.abc import Mapping

from fray.testing.acts import (
    asking,
    calls,
    crowding,
    groups,
    jobs,
    keeping,
    logs,
    machines,
    making_room,
    names,
    reaching,
    reserving,
    retrying,
    scopes,
    sharing,
    watching,
)
from fray.testing.acts.bench import Act, Bench, Desk, KnownActor, KnownJob, leaves

__all__ = ["ACTS", "Act", "Bench", "Desk", "KnownActor", "KnownJob", "leaves"]

ACTS: Mapping[str, Act] = {
    **jobs.ACTS,
    **scopes.ACTS,
    **calls.ACTS,
    **names.ACTS,
    **keeping.ACTS,
    **asking.ACTS,
    **watching.ACTS,
    **retrying.ACTS,
    **logs.ACTS,
    **reaching.ACTS,
    **machines.ACTS,
    **groups.ACTS,
    **reserving.ACTS,
    **sharing.ACTS,
    **making_room.ACTS,
    **crowding.ACTS,
}
