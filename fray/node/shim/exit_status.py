"""How an attempt ended, and how it is made to: plain decisions, no process in sight.

The first cause counts. A record that the job wrote before anybody asked it to stop is its outcome, whatever happened
to the process afterwards; after that what its keeper ended it for, the ladder, a signal nobody of Fray's sent, and the
exit code, in this order.
"""

from __future__ import annotations

import signal
from enum import IntEnum

from attrs import define, evolve, field, frozen

from fray.model.specs import EndReason, EntryKind, Outcome, TerminationPolicy


class TerminationStep(IntEnum):
    """One step of the ladder; each is sent at most once."""

    CANCEL = 1
    TERM = 2
    KILL = 3


@define
class TerminationSchedule:
    """Where an attempt is on its ladder. Times are those of one monotonic clock."""

    ladder: TerminationPolicy
    hears_cancel: bool
    """False for programs, which start at SIGTERM."""
    begun: float | None = None
    reached: TerminationStep | None = None

    def begin(self, now: float) -> None:
        """Start down; idempotent."""
        if self.begun is None:
            self.begun = now if self.hears_cancel else now - self.ladder.cancel_s

    def jump(self, now: float) -> None:
        """Straight to the bottom."""
        self.begun = min(self.begun or now, now - self.ladder.cancel_s - self.ladder.term_s)

    def due(self, now: float) -> TerminationStep | None:
        """The rung to take now, once; lower ones replace those that were missed."""
        if self.begun is None:
            return None
        age_s = now - self.begun
        rung = TerminationStep.CANCEL
        if age_s >= self.ladder.cancel_s:
            rung = TerminationStep.TERM
        if age_s >= self.ladder.cancel_s + self.ladder.term_s:
            rung = TerminationStep.KILL
        if self.reached is not None and rung <= self.reached:
            return None
        self.reached = rung
        return rung

    def next_at(self) -> float | None:
        """When `due` will say something again."""
        if self.begun is None or self.reached is TerminationStep.KILL:
            return None
        if self.reached is None:
            return self.begun
        return self.begun + self.ladder.cancel_s + (self.ladder.term_s if self.reached is TerminationStep.TERM else 0)


@frozen(kw_only=True)
class ExitStatus:
    """What was seen of the end of a job's main process."""

    entry: EntryKind
    exit_code: int | None = None
    signal: int | None = None
    record: Outcome | None = None
    """What the job wrote of itself, complete."""
    record_came_first: bool = False
    """Before the ladder began."""
    condemned: Outcome | None = None
    """Why its keeper ended it, if nobody asked for that and no record came before."""
    reached: TerminationStep | None = None
    out_of_memory: bool = False
    """The kernel killed something for lack of memory while the attempt ran."""
    last_lines: str = ""
    ladder: TerminationPolicy = field(factory=TerminationPolicy)
    duration_s: float = 0.0


def classify_exit(ending: ExitStatus) -> Outcome:
    """The outcome of an attempt; see the module's law."""
    return evolve(_judge(ending), duration_s=ending.duration_s)


def _judge(ending: ExitStatus) -> Outcome:
    record = ending.record
    if record is not None and (
        ending.record_came_first or ending.reached is None or record.cause is EndReason.SUCCEEDED
    ):
        return record if record.exit_code is not None else evolve(record, exit_code=ending.exit_code)
    if ending.condemned is not None:
        return evolve(ending.condemned, exit_code=ending.exit_code, signal=ending.signal)
    if ending.reached is not None:
        return _stopped(ending, ending.reached)
    if ending.signal is not None:
        return _killed(ending, ending.signal)
    return _exited(ending, ending.exit_code or 0)


def _stopped(ending: ExitStatus, reached: TerminationStep) -> Outcome:
    after_term_s = ending.ladder.cancel_s if ending.entry is not EntryKind.BINARY else 0.0
    how = {
        TerminationStep.CANCEL: "it ended when it was cancelled",
        TerminationStep.TERM: f"it ended by SIGTERM, sent {after_term_s:g} s after the request",
        TerminationStep.KILL: f"killed, at the latest {after_term_s + ending.ladder.term_s:g} s after the request",
    }[reached]
    return Outcome(
        cause=EndReason.STOPPED, message=f"stopped on request: {how}", exit_code=ending.exit_code, signal=ending.signal
    )


def _killed(ending: ExitStatus, number: int) -> Outcome:
    name = signal_name(number)
    if ending.out_of_memory and number == signal.SIGKILL:
        message = "killed by the kernel for lack of memory (its count of such kills rose while the job ran)"
        return Outcome(cause=EndReason.OUT_OF_MEMORY, message=message, signal=number)
    message = f"killed by {name} (nobody of Fray's sent it)"
    return Outcome(cause=EndReason.KILLED, message=_with_lines(message, ending.last_lines), signal=number)


def _exited(ending: ExitStatus, code: int) -> Outcome:
    if code == 0 and ending.entry is EntryKind.BINARY:
        return Outcome(cause=EndReason.SUCCEEDED, exit_code=0)
    message = f"ended with exit code {code}"
    if code == 0:
        message += " but without a result: something called os._exit or replaced the process"
    return Outcome(cause=EndReason.FAILURE, message=_with_lines(message, ending.last_lines), exit_code=code)


def _with_lines(message: str, last_lines: str) -> str:
    return f"{message}; its last words on stderr:\n{last_lines}" if last_lines else message


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 77`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
