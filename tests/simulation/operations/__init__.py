"""Acts of the drivers of a scenario, by name: a few operations on the public API each, with checks of their results.

An act returns its result in a few words. Errors that a fault explains may end it; `tests.simulation.run` sorts them.

Each module here has a table ``ACTS`` of its own; a new act is a line there, and one in
`tests.simulation.scenario_plans.ACTS` with its weight, or in a plan of `tests.simulation.directed_plans`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.operations import (
    calls,
    fairness,
    groups,
    health,
    jobs,
    logs,
    machines,
    names,
    overload,
    ports,
    preemption,
    queries,
    reservations,
    retries,
    scopes,
    supervision,
)
from tests.simulation.operations.context import (
    Act,
    DriverState,
    KnownActor,
    KnownJob,
    OperationContext,
    leaves,
)

__all__ = ["ACTS", "Act", "DriverState", "KnownActor", "KnownJob", "OperationContext", "leaves"]

ACTS: Mapping[str, Act] = {
    **jobs.ACTS,
    **scopes.ACTS,
    **calls.ACTS,
    **names.ACTS,
    **supervision.ACTS,
    **queries.ACTS,
    **health.ACTS,
    **retries.ACTS,
    **logs.ACTS,
    **ports.ACTS,
    **machines.ACTS,
    **groups.ACTS,
    **reservations.ACTS,
    **fairness.ACTS,
    **preemption.ACTS,
    **overload.ACTS,
}
