"""Reasons of waiting jobs are sent again while the cluster changes, at a bounded rate."""

from __future__ import annotations

import re
from typing import Any

import trio
import trio.testing
from attrs import evolve

from fray.controller.connections.waiting_jobs import ROUND_LIMIT, ROUND_S, WaitingJobs
from fray.model.messages.client import Explain, JobChanged, WatchJobs
from fray.model.resources import Demand
from fray.model.specs import JobInfo, JobState
from tests.support.controller import Client, spec, stage

WIDE = Demand(cpu_milli=8000)


def reasons_sent(client: Client) -> list[str]:
    """Reasons of the changes that a client was sent."""
    return [message.job.reason for message, _ in client.notices if isinstance(message, JobChanged)]


async def test_the_reason_of_a_waiting_job_follows_the_machines(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(spec(demand=WIDE))
        await driver.job("work-1", lambda info: "no machine is connected" in info.reason)
        await cluster.node("n1")
        await driver.job("work-1", lambda info: "n1 has 4 CPUs in all" in info.reason)
        await cluster.node("n2")
        await driver.job("work-1", lambda info: "2 have too few CPUs" in info.reason)


async def test_a_client_that_comes_later_takes_no_reason_from_the_others(autojump_clock: Any) -> None:
    async with stage() as cluster:
        first, second = await cluster.client(), await cluster.client()
        await first.launch(spec(demand=WIDE))
        await first.job("work-1", lambda info: "no machine is connected" in info.reason)
        await cluster.node("n1")
        (info,) = (await second.ask(WatchJobs(jobs=("work-1",)))).jobs
        assert "n1 has 4 CPUs in all" in info.reason
        await first.job("work-1", lambda info: "n1 has 4 CPUs in all" in info.reason)


async def test_nothing_is_sent_while_nothing_changes(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await cluster.node()
        await driver.launch(spec(demand=WIDE))
        await trio.sleep(10)
        before, turns = reasons_sent(driver), cluster.controller.loop.turns
        await trio.sleep(3600)
        assert reasons_sent(driver) == before
        assert cluster.controller.loop.turns == turns


async def test_explain_counts_the_seconds_of_a_wait_in_which_nothing_happened(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(spec(demand=WIDE))
        await trio.sleep(42)
        assert "waiting for 42 s" in (await driver.ask(Explain(job="work-1"))).text


async def test_an_expected_start_comes_closer_while_nothing_happens(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node(cpu=1)
        await driver.launch(spec("first", time_limit_s=600))
        await node.wait_desired("first-1:0:0")
        await driver.launch(spec("second"))

        async def expected_s() -> int:
            (seconds,) = re.findall(r"expected start: in (\d+) s", (await driver.ask(Explain(job="second-1"))).text)
            return int(seconds)

        before_s = await expected_s()
        await trio.sleep(300)
        assert 295 <= before_s - await expected_s() <= 305


async def test_a_hundred_thousand_waiting_jobs_are_looked_at_in_rounds(autojump_clock: Any) -> None:
    waiting, seen = WaitingJobs(), []
    count = 100_000
    for number in range(count):
        waiting.record(JobInfo(job_id=f"job-{number}", name="job", state=JobState.PENDING, reason="old"))

    def refresh(job_id: str, sent: str | None) -> bool:
        assert sent == "old"
        seen.append(job_id)
        return len(seen) % 2 == 0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting.run, refresh)
        waiting.cluster_changed()
        await trio.testing.wait_all_tasks_blocked()
        assert len(seen) == ROUND_LIMIT
        await trio.sleep(1.5 * ROUND_S)
        assert len(seen) == 2 * ROUND_LIMIT
        await trio.sleep(count / ROUND_LIMIT * ROUND_S)
        assert sorted(seen) == sorted(f"job-{number}" for number in range(count))  # each once
        seen.clear()
        waiting.cluster_changed()
        await trio.sleep(2 * count / ROUND_LIMIT * ROUND_S)
        assert len(seen) == count // 2  # without those that were dropped
        nursery.cancel_scope.cancel()


def test_a_job_that_runs_is_not_looked_at() -> None:
    waiting = WaitingJobs()
    info = JobInfo(job_id="job", name="job", state=JobState.PENDING, reason="x")
    waiting.record(info)
    waiting.record(evolve(info, state=JobState.RUNNING))
    assert repr(waiting) == "<WaitingJobs: 0, 0 to be looked at>"
