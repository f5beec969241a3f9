"""From what a node shall hold and what it holds to what it must do. Pure.

The whole law, by phase of what is held:

=================  =============  ====================  =======================
wanted             not held       held, not ended       held, ended
=================  =============  ====================  =======================
yes                Start          nothing               nothing (it is reported)
yes, with stop     Decline        Stop unless stopping  nothing (it is reported)
no                 nothing        Kill                  Forget
=================  =============  ====================  =======================

Deciding again changes nothing: all but Start may come any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

from fray.model.ids import AttemptId
from fray.model.specs import DesiredAttempt, ObservedAttempt, Phase


@frozen
class Start:
    wish: DesiredAttempt


@frozen
class Decline:
    """Report as stopped what was never started here."""

    wish: DesiredAttempt


@frozen
class Stop:
    """By the ladder; its outcome is reported."""

    attempt_id: AttemptId
    notice_s: float | None = None
    """See `Wish.notice_s`."""


@frozen
class Kill:
    """At once; nobody asks for its outcome any more."""

    attempt_id: AttemptId


@frozen
class Forget:
    attempt_id: AttemptId


Action: TypeAlias = Start | Decline | Stop | Kill | Forget


def decide(wanted: Mapping[AttemptId, DesiredAttempt], held: Mapping[AttemptId, ObservedAttempt]) -> list[Action]:
    """What to do now: endings first, so that what they free is free when something starts."""
    endings = [_of_held(held[attempt_id], wanted.get(attempt_id)) for attempt_id in held]
    starts = [_of_missing(wish) for attempt_id, wish in wanted.items() if attempt_id not in held]
    return [action for action in (*endings, *starts) if action is not None]


def _of_missing(wish: DesiredAttempt) -> Action:
    return Decline(wish) if wish.stop else Start(wish)


def _of_held(observed: ObservedAttempt, wish: DesiredAttempt | None) -> Action | None:
    if wish is None:
        return Forget(observed.attempt_id) if observed.phase is Phase.ENDED else Kill(observed.attempt_id)
    if wish.stop and observed.phase in (Phase.STARTING, Phase.RUNNING):
        return Stop(observed.attempt_id, wish.notice_s)
    return None
