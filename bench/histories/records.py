"""Records of a history: what one process did, when, and with which outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from attrs import frozen


class Outcome(StrEnum):
    """Knowledge of the end of an operation."""

    VALUE = "value"
    """Ended, with this value."""
    ERROR = "error"
    """Ended, without an effect."""
    UNKNOWN = "unknown"
    """Took effect once, will, or never does."""


class Kind(StrEnum):
    """Kind of an operation; the comment of each says what its ``key`` and ``value`` are."""

    CLAIM = "claim"  # a name; id of the actor that has it now, "" if another one has it
    RELEASE = "release"  # a name; id of the actor that had it
    LOOKUP = "lookup"  # a name; id of the actor that has it, "" if there is none
    INCREMENT = "increment"  # a counter; its new value
    READ = "read"  # a counter; its value
    CALL = "call"  # a token of its own
    REPEATABLE_CALL = "repeatable call"  # as a call, one that may be repeated (``idempotent=True``)
    EFFECT = "effect"  # the token of a call; the process is that of the actor
    LAUNCH = "launch"  # a job; the number of its members
    RUN = "run"  # a job; the process is an attempt of it, and the times are those of its first and last sign of life
    LOST_OWNER = "lost owner"  # the process ended at ``begin``, and what it owned must have ended at ``end``
    LOST_MACHINE = "lost machine"  # the same of a machine; only what began before it must have ended


@frozen
class Operation:
    """One operation, with times of the clock that all processes of a machine share (``CLOCK_MONOTONIC``), in seconds.

    Attributes:
        process: client, actor's incarnation, or attempt.
        end: None if it is not known, as of the calls of a process that was killed.
        owner: process whose loss must end this run; "" if there is none.
        machine: machine of this run.
    """

    process: str
    kind: Kind
    key: str
    begin: float
    end: float | None = None
    outcome: Outcome = Outcome.UNKNOWN
    value: Any = None
    owner: str = ""
    machine: str = ""

    def __str__(self) -> str:
        times = f"from {self.begin:.3f}" if self.end is None else f"from {self.begin:.3f} to {self.end:.3f}"
        outcome = self.outcome.value if self.outcome is not Outcome.VALUE else f"{self.value!r}"
        return f"{self.process}: {self.kind} {self.key} {times} = {outcome}"


def table(history: Iterable[Operation]) -> dict[str, int]:
    """Return the number of operations by kind and outcome; ``none``: a claim or lookup that got no actor."""
    return dict(sorted(Counter(f"{one.kind}, {'none' if one.value == '' else one.outcome}" for one in history).items()))
