"""What is due by the clock (`fray.scheduler.timers`), and who sees to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fray.scheduler import drain, preemption, quarantine, reservations, waiting
from fray.scheduler.outbox import Outbox
from fray.scheduler.reserved import RESERVATION
from fray.scheduler.state import State

DUE: Mapping[str, Callable[[State, Outbox, str], None]] = {
    "drain": drain.due,
    "probe": quarantine.due,
    RESERVATION: reservations.due,
    "seek": preemption.due,
    "wait": waiting.due,
}
"""By what is due: told of which row."""


def ticked(state: State, out: Outbox) -> None:
    """Everything whose time has come, in the order of their times."""
    for what, key in state.timers.take_due(state.now):
        DUE[what](state, out, key)
