"""The delay of the controller's loop: passes by their length, in the answer about usage."""

from __future__ import annotations

import time

import trio

from fray.controller.metrics.loop_delay import BOUNDS_S, LoopDelayMeter
from fray.model.messages.usage import LoopDelay


def test_a_pass_that_blocks_is_counted_by_its_length() -> None:
    async def main(blocks_s: float) -> LoopDelay:
        meter = LoopDelayMeter()
        with meter.measuring():
            await trio.sleep(0.001)
            time.sleep(blocks_s)  # noqa: ASYNC251 - the pass that is measured
            await trio.sleep(0.001)
        return meter.histogram()

    delay = trio.run(main, 0.06)
    assert sum(delay.counts[BOUNDS_S.index(0.1) :]) == 1
    assert delay.longest_s >= 0.06
    assert delay.quantile_s(1.0) == delay.longest_s


def test_a_pass_that_waits_for_the_disk_takes_wall_time_and_one_that_computes_takes_cpu_time_too() -> None:
    async def main(computes: bool) -> LoopDelay:
        meter = LoopDelayMeter()
        with meter.measuring():
            await trio.sleep(0.001)
            if computes:
                until = time.thread_time() + 0.25
                while time.thread_time() < until:
                    pass
            else:
                time.sleep(0.25)  # noqa: ASYNC251 - the pass that is measured
            await trio.sleep(0.001)
        return meter.histogram()

    waited, computed = trio.run(main, False), trio.run(main, True)
    assert [sum(one.counts) == sum(one.cpu_counts) for one in (waited, computed)] == [True, True]
    assert waited.longest_s >= 0.25 > waited.longest_cpu_s
    assert computed.longest_cpu_s >= 0.25
    assert computed.cpu_quantile_s(1.0) == computed.longest_cpu_s


def test_nothing_is_measured_before_and_after() -> None:
    async def main() -> tuple[LoopDelay, LoopDelay, LoopDelay]:
        meter = LoopDelayMeter()
        await trio.sleep(0.001)
        before = meter.histogram()
        with meter.measuring():
            await trio.sleep(0.001)
        then = meter.histogram()
        await trio.sleep(0.001)
        return before, then, meter.histogram()

    before, then, after = trio.run(main)
    assert before == LoopDelay()
    assert sum(then.counts) > 0
    assert after == then


def test_a_quantile_is_the_bound_of_its_bucket_and_never_more_than_the_longest_pass() -> None:
    delay = LoopDelay(bounds_s=(0.01, 0.1), counts=(98, 1, 1), longest_s=0.5)
    assert [delay.quantile_s(part) for part in (0.5, 0.99, 1.0)] == [0.01, 0.1, 0.5]
    assert LoopDelay(bounds_s=(0.01,), counts=(1, 0), longest_s=0.004).quantile_s(0.99) == 0.004
    assert LoopDelay().quantile_s(0.99) == 0.0
