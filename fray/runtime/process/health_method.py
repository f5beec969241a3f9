"""Periodic call of an actor's health method, through its normal queue; the outcome is reported to the node.

Invariants: at most one call is open. While its answer is late, each further period reports that; a process whose loop
is stuck reports nothing, which its node counts as a failure, too. A late call is not cancelled, since with
`kill_after_s` that could end the process. Health calls do not count as use of an idle actor.
"""

from __future__ import annotations

from typing import Any

import trio

from fray.model.monitoring.health import HealthCheck
from fray.model.monitoring.progress_protocol import HealthReport
from fray.net.codec import Kind
from fray.runtime.actors.incoming_call import INTERNAL_CALL, IncomingCall
from fray.runtime.actors.served_actor import ServedActor
from fray.runtime.calls.dedup import Answer
from fray.runtime.process.progress import ProgressReporter
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffers import PRIVATE, TransferCapabilities


class _HealthCall:
    """Origin of one call of a health method; a `fray.runtime.actors.incoming_call.CallOrigin`."""

    capabilities: TransferCapabilities = PRIVATE

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.failure = ""

    def answer(self, call: IncomingCall, answer: Answer) -> None:
        if answer[0] == Kind.FAULT:
            error = errors.load_error(bytes(answer[2]))
            self.failure = f"{type(error).__name__}: {error}"
        self.answered.set()

    def deliver(self, target: int, call: IncomingCall) -> None:
        # Only light actors have calls delivered again, and those have no health checks; the answer ends the wait
        # anyway.
        self.failure = "the actor has moved on"
        self.answered.set()

    def send_item(self, call: IncomingCall, data: Any) -> None:
        pass

    def grant_credit(self, call: IncomingCall, items: int) -> None:
        pass

    async def wait_room(self) -> None:
        await trio.lowlevel.checkpoint()


async def run_health_checks(hosted: ServedActor, check: HealthCheck, reporter: ProgressReporter) -> None:
    """Call the health method every period until cancelled."""
    next_at = trio.current_time()
    while True:
        call = _start_call(hosted, check.actor or "")
        await _await_answer(call, check, reporter)
        # After a late answer the next period is a whole one: no burst of calls follows.
        next_at = max(next_at + check.period_s, trio.current_time())
        await trio.sleep_until(next_at)


def _start_call(hosted: ServedActor, method: str) -> _HealthCall:
    call = _HealthCall()
    body = pickling.pack_call(method, (), {})
    assert isinstance(body, bytes)
    hosted.submit(IncomingCall(call, INTERNAL_CALL, 0, method, body))
    # Not part of a batch of frames, whose end would flush.
    hosted.flush()
    return call


async def _await_answer(call: _HealthCall, check: HealthCheck, reporter: ProgressReporter) -> None:
    while True:
        with trio.move_on_after(check.period_s):
            await call.answered.wait()
            reporter.report_health(HealthReport(not call.failure, call.failure))
            return
        reporter.report_health(HealthReport(False, f"no answer within {check.period_s:g} s"))
