"""An actor asks itself whether it is well: its health method, in its normal queue, every period; the answer goes up.

Law: at most one question is open. While an answer is late each further period says so; a process whose loop does not
turn says nothing, which its node takes for the same. A question keeps no idle actor alive.
"""

from __future__ import annotations

from typing import Any

import trio

from fray.model.monitoring.health import HealthCheck
from fray.model.monitoring.progress_protocol import Pulse
from fray.net.codec import Kind
from fray.runtime.actors.hosted_actor import Hosted
from fray.runtime.actors.incoming_call import NOBODYS, HostCall
from fray.runtime.calls.wire import Answer
from fray.runtime.process.progress import Voice
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffers import PRIVATE, Terms


class _Question:
    """The caller of one health method (see `fray.runtime.actors.incoming_call.Guest`)."""

    terms: Terms = PRIVATE

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.wrong = ""

    def answer(self, call: HostCall, answer: Answer) -> None:
        if answer[0] == Kind.FAULT:
            error = errors.load_error(bytes(answer[2]))
            self.wrong = f"{type(error).__name__}: {error}"
        self.answered.set()

    def hand_over(self, target: int, call: HostCall) -> None:
        self.wrong = "the actor has moved on"
        self.answered.set()

    def item(self, call: HostCall, data: Any) -> None:
        pass

    def grant(self, call: HostCall, items: int) -> None:
        pass

    async def wait_room(self) -> None:
        await trio.lowlevel.checkpoint()


async def keep_asking(hosted: Hosted, check: HealthCheck, voice: Voice) -> None:
    """Ask until cancelled."""
    next_at = trio.current_time()
    while True:
        question = _ask(hosted, check.actor or "")
        await _await_answer(question, check, voice)
        next_at = max(next_at + check.period_s, trio.current_time())
        await trio.sleep_until(next_at)


def _ask(hosted: Hosted, method: str) -> _Question:
    question = _Question()
    body = pickling.pack_call(method, (), {})
    assert isinstance(body, bytes)
    hosted.take(HostCall(question, NOBODYS, 0, method, body))
    hosted.flush()
    return question


async def _await_answer(question: _Question, check: HealthCheck, voice: Voice) -> None:
    while True:
        with trio.move_on_after(check.period_s):
            await question.answered.wait()
            voice.pulse(Pulse(not question.wrong, question.wrong))
            return
        voice.pulse(Pulse(False, f"no answer within {check.period_s:g} s"))
