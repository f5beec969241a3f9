"""Reports of waits: one when a job begins to wait for longer than a moment, one when its last wait ends."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from fray.model.messages.client import ReportWait
from fray.runtime.waits import DEBOUNCE_S, WaitCounter


async def reports_of(waits: list[tuple[float, float]]) -> list[tuple[float, bool]]:
    """Return the time and content of each report, of waits from one time to another (seconds)."""
    sent: list[tuple[float, bool]] = []
    began = trio.current_time()

    async def send(message: ReportWait) -> None:
        await trio.lowlevel.checkpoint()
        sent.append((round(trio.current_time() - began, 3), message.waiting))

    async def wait(counter: WaitCounter, start: float, end: float) -> None:
        await trio.sleep_until(began + start)
        with counter.counted():
            await trio.sleep_until(began + end)

    async with trio.open_nursery() as nursery:
        counter = WaitCounter(trio.lowlevel.current_trio_token(), send)
        nursery.start_soon(counter.run)
        async with trio.open_nursery() as waiting:
            for start, end in waits:
                waiting.start_soon(wait, counter, start, end)
        await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    return sent


async def test_the_end_of_a_wait_is_reported_at_once(autojump_clock: MockClock) -> None:
    assert await reports_of([(1.0, 2.0)]) == [(1.0 + DEBOUNCE_S, True), (2.0, False)]


async def test_waits_that_overlap_are_one(autojump_clock: MockClock) -> None:
    assert await reports_of([(1.0, 2.0), (1.5, 3.0)]) == [(1.0 + DEBOUNCE_S, True), (3.0, False)]


async def test_a_short_wait_is_not_reported(autojump_clock: MockClock) -> None:
    assert await reports_of([(1.0, 1.0 + DEBOUNCE_S / 2)]) == []


async def test_a_thread_that_waits_counts_as_a_task(autojump_clock: MockClock) -> None:
    sent: list[bool] = []

    async def send(message: ReportWait) -> None:
        sent.append(message.waiting)
        reported.set()

    reported = trio.Event()
    async with trio.open_nursery() as nursery:
        counter = WaitCounter(trio.lowlevel.current_trio_token(), send)
        nursery.start_soon(counter.run)
        entered, left = trio.Event(), trio.Event()

        def wait() -> None:
            with counter.counted():
                trio.from_thread.run_sync(entered.set)
                trio.from_thread.run(left.wait)

        nursery.start_soon(trio.to_thread.run_sync, wait)
        await entered.wait()
        await reported.wait()
        reported = trio.Event()
        left.set()
        await reported.wait()
        nursery.cancel_scope.cancel()
    assert sent == [True, False]
