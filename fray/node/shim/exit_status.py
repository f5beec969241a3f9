"""Classification of how an attempt ended, and the schedule that ends it. Pure.

The first cause counts. A result that the job recorded before a stop was requested is its outcome, whatever happened to
the process afterwards; after that come, in this order, the reason its shim ended it for, the termination, a signal that
Fray did not send, and the exit code.
"""

from __future__ import annotations

import signal
from enum import IntEnum

from attrs import define, evolve, field, frozen

from fray.model.specs import EndReason, EntryKind, Outcome, TerminationPolicy
from fray.model.text import signal_name


class TerminationStep(IntEnum):
    """Step of the termination; each is taken at most once."""

    CANCEL = 1
    TERM = 2
    KILL = 3


@define
class TerminationSchedule:
    """Progress of one attempt's termination. All times are of one monotonic clock."""

    policy: TerminationPolicy
    can_cancel: bool
    """False for programs, whose termination starts with SIGTERM."""
    started_at: float | None = None
    reached: TerminationStep | None = None

    def begin(self, now: float) -> None:
        """Start the termination; idempotent."""
        if self.started_at is None:
            # Without a cancel step the start lies cancel_s in the past, so that SIGTERM is due now and all later times
            # still fit.
            self.started_at = now if self.can_cancel else now - self.policy.cancel_s

    def skip_to_kill(self, now: float) -> None:
        """Make SIGKILL due now."""
        # The same arithmetic: SIGKILL is due now. min: a kill never postpones what has started earlier.
        self.started_at = min(self.started_at or now, now - self.policy.cancel_s - self.policy.term_s)

    def next_step(self, now: float) -> TerminationStep | None:
        """Return the step to take now, once; later steps replace those that were missed."""
        if self.started_at is None:
            return None
        age_s = now - self.started_at
        # Only the latest due step is returned. After a pause of the shim (SIGSTOP, an overloaded machine) a cancel that
        # is followed by SIGTERM at once would only cut the job's reaction short.
        step = TerminationStep.CANCEL
        if age_s >= self.policy.cancel_s:
            step = TerminationStep.TERM
        if age_s >= self.policy.cancel_s + self.policy.term_s:
            step = TerminationStep.KILL
        if self.reached is not None and step <= self.reached:
            return None
        self.reached = step
        return step

    def next_due_at(self) -> float | None:
        """Return when `next_step` will return another step; None: never, or not started."""
        if self.started_at is None or self.reached is TerminationStep.KILL:
            return None
        if self.reached is None:
            return self.started_at
        return (
            self.started_at + self.policy.cancel_s + (self.policy.term_s if self.reached is TerminationStep.TERM else 0)
        )


@frozen(kw_only=True)
class ExitStatus:
    """Observations of the end of a job's main process."""

    entry: EntryKind
    exit_code: int | None = None
    signal: int | None = None
    record: Outcome | None = None
    """Outcome that the job recorded itself, complete."""
    record_before_stop: bool = False
    """True if the record was written before the termination started."""
    forced_outcome: Outcome | None = None
    """Reason its shim ended it for, if no stop was requested and no record came before."""
    reached: TerminationStep | None = None
    out_of_memory: bool = False
    """True if the kernel OOM-killed something while the attempt ran."""
    last_lines: str = ""
    termination: TerminationPolicy = field(factory=TerminationPolicy)
    duration_s: float = 0.0


def classify_exit(status: ExitStatus) -> Outcome:
    """Return the outcome of an attempt, by the order in this module's docstring."""
    return evolve(_decide(status), duration_s=status.duration_s)


def _decide(status: ExitStatus) -> Outcome:
    record = status.record
    # A success counts even after the stop began: the work was done. Another record after the stop is the job's reaction
    # to its cancellation and not its outcome.
    if record is not None and (
        status.record_before_stop or status.reached is None or record.cause is EndReason.SUCCEEDED
    ):
        # The record has the code that the code chose (``sys.exit(3)``); the process itself may have been killed
        # afterwards.
        return record if record.exit_code is not None else evolve(record, exit_code=status.exit_code)
    if status.forced_outcome is not None:
        return evolve(status.forced_outcome, exit_code=status.exit_code, signal=status.signal)
    if status.reached is not None:
        return _stopped_outcome(status, status.reached)
    if status.signal is not None:
        return _killed_outcome(status, status.signal)
    return _exited_outcome(status, status.exit_code or 0)


def _stopped_outcome(status: ExitStatus, reached: TerminationStep) -> Outcome:
    after_term_s = status.termination.cancel_s if status.entry is not EntryKind.BINARY else 0.0
    how = {
        TerminationStep.CANCEL: "ended after it was cancelled",
        TerminationStep.TERM: f"ended by SIGTERM, sent {after_term_s:g} s after the request",
        TerminationStep.KILL: f"killed, at the latest {after_term_s + status.termination.term_s:g} s after the request",
    }[reached]
    return Outcome(
        cause=EndReason.STOPPED, message=f"stopped on request: {how}", exit_code=status.exit_code, signal=status.signal
    )


def _killed_outcome(status: ExitStatus, number: int) -> Outcome:
    name = signal_name(number)
    # The kernel's OOM killer sends SIGKILL only. Its count may also have risen because of another process.
    if status.out_of_memory and number == signal.SIGKILL:
        message = "killed by the kernel, which ran out of memory (its OOM kill count rose while the job ran)"
        return Outcome(cause=EndReason.OUT_OF_MEMORY, message=message, signal=number)
    message = f"killed by {name} (not sent by Fray)"
    return Outcome(cause=EndReason.KILLED, message=_with_lines(message, status.last_lines), signal=number)


def _exited_outcome(status: ExitStatus, code: int) -> Outcome:
    # Python code records its result before it exits, so exit code 0 alone proves a success of programs only.
    if code == 0 and status.entry is EntryKind.BINARY:
        return Outcome(cause=EndReason.SUCCEEDED, exit_code=0)
    message = f"ended with exit code {code}"
    if code == 0:
        message += " but without a result: something called os._exit or replaced the process"
    return Outcome(cause=EndReason.FAILURE, message=_with_lines(message, status.last_lines), exit_code=code)


def _with_lines(message: str, last_lines: str) -> str:
    return f"{message}; last lines of stderr:\n{last_lines}" if last_lines else message
