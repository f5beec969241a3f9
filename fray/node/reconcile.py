"""Decision of what a node must do, from the desired and the observed attempts. Pure.

The decision, by phase of the observed attempt:

=================  =============  ====================  =======================
desired            not observed   observed, not ended   observed, ended
=================  =============  ====================  =======================
yes                Start          nothing               nothing (it is reported)
yes, with stop     Decline        Stop unless stopping  nothing (it is reported)
no                 nothing        Kill                  Forget
=================  =============  ====================  =======================

Deciding again is idempotent: all actions but Start may be repeated any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

from fray.model.ids import AttemptId
from fray.model.specs import DesiredAttempt, ObservedAttempt, Phase


@frozen
class Start:
    """Start an attempt."""

    desired: DesiredAttempt


@frozen
class Decline:
    """Report an attempt as stopped that was never started here."""

    desired: DesiredAttempt


@frozen
class Stop:
    """End an attempt by its termination policy, and report its outcome."""

    attempt_id: AttemptId
    notice_s: float | None = None
    """See `DesiredAttempt.notice_s`."""


@frozen
class Kill:
    """End an attempt at once; its outcome is not needed."""

    attempt_id: AttemptId


@frozen
class Forget:
    """Drop an attempt."""

    attempt_id: AttemptId


Action: TypeAlias = Start | Decline | Stop | Kill | Forget


def decide(
    desired_attempts: Mapping[AttemptId, DesiredAttempt], observed_attempts: Mapping[AttemptId, ObservedAttempt]
) -> list[Action]:
    """Return what to do now."""
    # Endings first, so that their resources are released before something starts.
    endings = [
        _act_on_observed(observed_attempts[attempt_id], desired_attempts.get(attempt_id))
        for attempt_id in observed_attempts
    ]
    starts = [
        _act_on_missing(desired)
        for attempt_id, desired in desired_attempts.items()
        if attempt_id not in observed_attempts
    ]
    return [action for action in (*endings, *starts) if action is not None]


def _act_on_missing(desired: DesiredAttempt) -> Action:
    # Stopped before its start arrived here; the controller still waits for an outcome.
    return Decline(desired) if desired.stop else Start(desired)


def _act_on_observed(observed: ObservedAttempt, desired: DesiredAttempt | None) -> Action | None:
    if desired is None:
        # No longer desired: the controller has given it up, with its machine or its job, so it need not end in order.
        return Forget(observed.attempt_id) if observed.phase is Phase.ENDED else Kill(observed.attempt_id)
    # Not while it is stopping: the termination policy counts from the first request.
    if desired.stop and observed.phase in (Phase.STARTING, Phase.RUNNING):
        return Stop(observed.attempt_id, desired.notice_s)
    return None
