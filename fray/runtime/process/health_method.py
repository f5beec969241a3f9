"""An actor asks itself whether it is well: its health method, in its normal queue, every period; the answer goes up.

Law: at most one question is open. While an answer is late each further period says so; a process whose loop does not
turn says nothing, which its node takes for the same. A question keeps no idle actor alive.
"""

from __future__ import annotations

from typing import Any

import trio

from fray.model.monitoring.health import HealthCheck
from fray.model.monitoring.progress_protocol import HealthReport
from fray.net.codec import Kind
from fray.runtime.actors.hosted_actor import HostedActor
from fray.runtime.actors.incoming_call import INTERNAL_CALL, IncomingCall
from fray.runtime.calls.dedup import Answer
from fray.runtime.process.progress import ProgressReporter
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffers import PRIVATE, TransferCapabilities


class _HealthCall:
    """The caller of one health method (see `fray.runtime.actors.incoming_call.Guest`)."""

    capabilities: TransferCapabilities = PRIVATE

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.wrong = ""

    def answer(self, call: IncomingCall, answer: Answer) -> None:
        if answer[0] == Kind.FAULT:
            error = errors.load_error(bytes(answer[2]))
            self.wrong = f"{type(error).__name__}: {error}"
        self.answered.set()

    def deliver(self, target: int, call: IncomingCall) -> None:
        self.wrong = "the actor has moved on"
        self.answered.set()

    def send_item(self, call: IncomingCall, data: Any) -> None:
        pass

    def grant_credit(self, call: IncomingCall, items: int) -> None:
        pass

    async def wait_room(self) -> None:
        await trio.lowlevel.checkpoint()


async def run_health_checks(hosted: HostedActor, check: HealthCheck, reporter: ProgressReporter) -> None:
    """Ask until cancelled."""
    next_at = trio.current_time()
    while True:
        question = _ask(hosted, check.actor or "")
        await _await_answer(question, check, reporter)
        next_at = max(next_at + check.period_s, trio.current_time())
        await trio.sleep_until(next_at)


def _ask(hosted: HostedActor, method: str) -> _HealthCall:
    question = _HealthCall()
    body = pickling.pack_call(method, (), {})
    assert isinstance(body, bytes)
    hosted.submit(IncomingCall(question, INTERNAL_CALL, 0, method, body))
    hosted.flush()
    return question


async def _await_answer(question: _HealthCall, check: HealthCheck, voice: ProgressReporter) -> None:
    while True:
        with trio.move_on_after(check.period_s):
            await question.answered.wait()
            voice.report_health(HealthReport(not question.wrong, question.wrong))
            return
        voice.report_health(HealthReport(False, f"no answer within {check.period_s:g} s"))
