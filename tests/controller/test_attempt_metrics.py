"""Metrics of attempts: from nodes to the controller, which does not store them, and to the followers of the job."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from fray.controller.metrics import attempt_metrics as book
from fray.controller.metrics.attempt_metrics import AttemptMetricsStore
from fray.controller.metrics.stack_captures import CAPTURE_TIMEOUT_S, StackCaptures
from fray.errors import NoSuchJob
from fray.model.messages.node import CaptureRequest, StackCapture
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.monitoring.health import Progress
from fray.scheduler.state.state import State
from tests.support.scheduler import Cluster, job


def said(attempt: str, done: float, age_s: float = 0.0, captured: str = "") -> AttemptMetrics:
    return AttemptMetrics(attempt_id=attempt, progress=Progress(done=done), age_s=age_s, captured=captured)


def test_the_time_of_progress_is_the_controllers_less_its_age() -> None:
    vitals = AttemptMetricsStore()
    vitals.record([said("j:0:0", 5, age_s=2.0)], now=100.0)
    (kept,) = vitals.latest(["j:0:0"])
    assert kept.progress == Progress(done=5, time=98.0)


def test_stacks_stay_when_the_next_measurement_has_none_and_the_oldest_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book, "CAPTURED_LIMIT_BYTES", 250)
    vitals = AttemptMetricsStore()
    vitals.record([said("a:0:0", 1, captured="x" * 100)], now=0.0)
    vitals.record([said("a:0:0", 2)], now=0.0)
    assert vitals.latest(["a:0:0"])[0].captured == "x" * 100
    vitals.record([said("b:0:0", 1, captured="y" * 100), said("c:0:0", 1, captured="z" * 100)], now=0.0)
    assert [len(one.captured) for one in vitals.latest(["a:0:0", "b:0:0", "c:0:0"])] == [0, 100, 100]


def test_the_book_forgets_those_that_have_been_quiet_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "KEPT_LIMIT", 2)
    vitals = AttemptMetricsStore()
    for attempt in ("a:0:0", "b:0:0", "a:0:0", "c:0:0"):
        vitals.record([said(attempt, 1)], now=0.0)
    assert [one.attempt_id for one in vitals.latest(["a:0:0", "b:0:0", "c:0:0"])] == ["a:0:0", "c:0:0"]


async def test_followers_of_a_gang_get_its_metrics_at_most_twice_a_second(autojump_clock: MockClock) -> None:
    vitals, updates = AttemptMetricsStore(), list[tuple[float, str, int]]()

    async def members(number: int) -> None:
        for done in range(100):
            vitals.record([said(f"j:0:{number}", done)], now=0.0)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(vitals.run, lambda job, attempts: updates.append((trio.current_time(), job, len(attempts))))
        async with trio.open_nursery() as gang:
            for number in range(50):
                gang.start_soon(members, number)
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    assert 19 <= len(updates) <= 23
    assert {job for _, job, _ in updates} == {"j"}
    assert vitals.latest(["j:0:49"])[0].progress == Progress(done=99)


# Looking into jobs ---------------------------------------------------------------------------------------------------


def two_members() -> State:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=1)
    scheduler.node("n2", cpu=1)
    scheduler.launch(job("j", members=2))
    return scheduler.state


async def test_a_silent_node_does_not_delay_a_stack_capture(autojump_clock: MockClock) -> None:
    captures = StackCaptures(two_members())
    asked: list[tuple[str, CaptureRequest]] = []

    def ask(node: str, question: CaptureRequest) -> bool:
        asked.append((node, question))
        return True

    (ref, nodes) = captures.start("j", ask), {node: question.attempts for node, question in asked}
    for node, attempts in nodes.items():
        captures.on_capture("stranger", StackCapture(ref=ref, attempt_id=attempts[0], text="forged"))
        if node == "n1":
            captures.on_capture(node, StackCapture(ref=ref, attempt_id=attempts[0], text="its stacks"))
    began = trio.current_time()
    texts = await captures.answer(ref)
    assert trio.current_time() - began == CAPTURE_TIMEOUT_S
    assert list(texts) == ["j:0:0", "j:0:1"]
    assert texts[nodes["n1"][0]] == "its stacks"
    assert texts[nodes["n2"][0]] == f"[fray] node n2 did not answer within {CAPTURE_TIMEOUT_S:g} s"


async def test_nodes_without_a_conversation_are_not_waited_for(autojump_clock: MockClock) -> None:
    captures = StackCaptures(two_members())
    began = trio.current_time()
    texts = await captures.answer(captures.start("j", lambda node, question: False))
    assert trio.current_time() == began
    assert sorted(texts.values()) == [f"[fray] node {node} cannot be reached now" for node in ("n1", "n2")]
    with pytest.raises(NoSuchJob):
        captures.start("unknown", lambda node, question: True)
