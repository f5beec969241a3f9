"""Lines about the pending jobs of a driver: after five seconds, once, then at each change; few for a thousand jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from fray import Cluster, Entrypoint, InvalidRequest, JobInfo, JobRequest, JobState, ResourceConfig
from fray.api.open import reports_waits
from fray.model.specs import AttemptInfo
from fray.runtime.controller_client import pending_jobs
from fray.runtime.controller_client.pending_jobs import PendingReport
from fray.testing.sim_cluster import DriverProcess, SimCluster
from tests.simulation import workloads
from tests.simulation.test_sim_drivers import run_scenario

LARGE = ResourceConfig(cpu=8, memory="100MB")


def info(name: str, kind: str = "needs_capacity", reason: str = "needs 2 CPUs", *, placed: bool = False) -> JobInfo:
    attempts = (AttemptInfo(attempt_id=f"{name}:1:0", node="n1"),) if placed else ()
    return JobInfo(job_id=name, name=name, state=JobState.PENDING, reason=reason, reason_kind=kind, attempts=attempts)


def looks(*rounds: tuple[float, Sequence[JobInfo]]) -> list[list[str]]:
    report = PendingReport()
    return [report.look(now, infos) for now, infos in rounds]


def test_a_job_is_reported_after_five_seconds_and_once() -> None:
    job = info("train")
    assert looks((0, [job]), (4.9, [job]), (5, [job]), (6, [job]), (600, [job])) == [
        [],
        [],
        ["train waits: needs 2 CPUs"],
        [],
        [],
    ]


def test_another_kind_of_reason_is_reported_at_once_and_another_text_of_the_same_kind_is_not() -> None:
    moved = info("train", reason="needs 2 CPUs; number 3 of 4 in the queue")
    other = info("train", "quota_exceeded", "over the quota of user ann")
    assert looks((0, [info("train")]), (5, [info("train")]), (6, [moved]), (7, [other]), (8, [other])) == [
        [],
        ["train waits: needs 2 CPUs"],
        [],
        ["train waits: over the quota of user ann"],
        [],
    ]


def test_a_job_that_has_run_in_between_is_reported_again() -> None:
    job = info("train")
    found = looks((0, [job]), (5, [job]), (6, []), (7, [job]), (11.9, [job]), (12, [job]))
    assert found == [[], ["train waits: needs 2 CPUs"], [], [], [], ["train waits: needs 2 CPUs"]]


def test_a_start_has_five_seconds_of_its_own() -> None:
    queued, starting = info("train"), info("train", "starting", "starting on n1", placed=True)
    rounds = ((0, [queued]), (5, [queued]), (6, [starting]), (10.9, [starting]), (11, [starting]))
    assert looks(*rounds) == [[], ["train waits: needs 2 CPUs"], [], [], ["train waits: starting on n1"]]


def test_a_thousand_jobs_that_wait_for_the_same_take_three_lines() -> None:
    sweep = [info(f"s{number}") for number in range(1000)]
    later = [*sweep[1:], info("late")]
    assert looks((0, sweep), (5, sweep), (6, later), (12, later)) == [
        [],
        [
            "s0 waits: needs 2 CPUs",
            "s1 waits: needs 2 CPUs",
            "998 more jobs wait for similar reasons: job.info.reason has that of each",
        ],
        [],
        [],
    ]


def test_a_job_without_a_reason_is_not_reported() -> None:
    job = info("train", "", "")
    assert looks((0, [job]), (9, [job])) == [[], []]


@pytest.mark.parametrize(
    ("value", "argument", "result"),
    [(None, None, True), ("0", None, False), ("1", None, True), ("0", True, True), ("1", False, False)],
)
def test_the_argument_comes_before_the_variable(
    value: str | None, argument: bool | None, result: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FRAY_REPORT_WAITS", raising=False)
    if value is not None:
        monkeypatch.setenv("FRAY_REPORT_WAITS", value)
    assert reports_waits(argument) is result


def test_an_unknown_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAY_REPORT_WAITS", "never")
    with pytest.raises(InvalidRequest, match="invalid FRAY_REPORT_WAITS='never': write FRAY_REPORT_WAITS=0"):
        reports_waits(None)


# In a cluster, on a virtual clock -------------------------------------------------------------------------------------


def driven(body: Callable[[Cluster], Awaitable[None]]) -> list[tuple[float, str]]:
    """Run a driver that reports; return each line with the second in which it was written."""
    said: list[tuple[float, str]] = []

    async def reporting(cluster: Cluster) -> None:
        began = trio.current_time()

        def write(lines: Sequence[str]) -> None:
            said.extend((round(trio.current_time() - began), line) for line in lines)

        cluster._runtime.nursery.start_soon(pending_jobs.report_pending, cluster._runtime.client.jobs, write)
        await body(cluster)

    async def scenario(sim: SimCluster) -> None:
        await DriverProcess(sim, "driver").run(reporting, namespace=None, grace_s=None)

    assert run_scenario(scenario, machines=1) == []
    return said


def holding(name: str, span_s: float) -> JobRequest:
    return JobRequest(name, LARGE, Entrypoint.from_callable(workloads.give, (name, 1, span_s)))


async def job_wait(cluster: Cluster) -> None:
    await cluster.launch(holding("holder", 60.0))
    assert await (await cluster.launch(holding("train", 1.0))).wait() == 1


async def scope_exit(cluster: Cluster) -> None:
    async with cluster.open_scope("run") as scope:
        await scope.launch(holding("holder", 60.0))
        await scope.launch(holding("train", 1.0))


async def actor_call(cluster: Cluster) -> None:
    await cluster.launch(holding("holder", 60.0))
    actor = await cluster.create_actor(workloads.Counter, name="train", resources=LARGE)
    assert await actor.add("first") == 1


@pytest.mark.parametrize("body", [job_wait, scope_exit, actor_call])
def test_each_kind_of_wait_for_a_pending_child_is_reported_once(body: Callable[[Cluster], Awaitable[None]]) -> None:
    ((at, line),) = driven(body)
    assert at in (5, 6)
    job, _, reason = line.partition(" waits: ")
    assert job.startswith("train")
    assert reason.startswith("over the quota of user driver (8 CPUs in use of 8 CPUs)")


def test_a_change_of_the_reason_is_reported_within_a_second() -> None:
    async def body(cluster: Cluster) -> None:
        failing = Entrypoint.from_callable(workloads.fail, ("train", 0.0))
        train = await cluster.launch(
            JobRequest("train", LARGE, failing, max_retries_failure=1, backoff_s=20.0, backoff_max_s=20.0)
        )
        await trio.sleep(1)
        await cluster.launch(holding("holder", 60.0))
        await train.wait_ended()

    (first, backoff), (second, quota) = driven(body)
    assert backoff.partition(" waits: ")[2].startswith("restarts in ")
    assert quota.partition(" waits: ")[2].startswith("over the quota of user driver")
    assert 5 <= first <= 6
    assert first < second <= 22


def test_jobs_that_start_are_not_reported() -> None:
    async def body(cluster: Cluster) -> None:
        jobs = [await cluster.launch(holding(f"short-{number}", 0.5)) for number in range(5)]
        await cluster.wait(jobs)

    assert driven(body) == []
