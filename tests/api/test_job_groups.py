"""Job groups of the async API, in a local cluster on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import fray
import fray.blocking
from fray import (
    Entrypoint,
    InvalidRequest,
    JobGroupConfig,
    JobRequest,
    JobRole,
    JobState,
    JobStopped,
    NeverSchedulable,
    ResourceConfig,
)

TINY = ResourceConfig(cpu=0.001, memory="1MB")


class Boom(Exception):
    pass


async def double(number: int) -> int:
    await trio.lowlevel.checkpoint()
    return 2 * number


async def stay() -> None:
    await trio.sleep_forever()


async def boom(after_s: float = 0.0) -> None:
    await trio.sleep(after_s)
    raise Boom("loss is NaN")


def work(name: str, fn: Any, *args: Any, **more: Any) -> JobRequest:
    return JobRequest(name, TINY, Entrypoint.from_callable(fn, args), **more)


async def test_a_group_is_a_list_of_its_jobs_and_can_be_awaited() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
        group = await scope.launch_group([work("a", double, 1), work("b", double, 2)], JobGroupConfig("rl"))
        assert [job.name for job in group] == ["a", "b"]
        assert len(group) == 2
        assert group.name == "rl"
        assert await group.wait() == [2, 4]
        info = await group.info()
        assert info.state == JobState.SUCCEEDED
        assert [each.role for each in info.members] == ["a", "b"]
        assert group[0].info.job_group == group.id
        assert group[0].info.role == "a"
        assert [each.group_id for each in await cluster.list_groups()] == [group.id]
        assert [each.state for each in await cluster.wait(group)] == [JobState.SUCCEEDED] * 2


async def test_auxiliary_members_are_ended_when_the_primary_ones_have_succeeded() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
        group = await scope.launch_group(
            [
                work("trainer", double, 3, role="trainer"),
                work("r1", stay, role=JobRole("rollout", stage=1, auxiliary=True)),
                work("r2", stay, role=JobRole("rollout", stage=1, auxiliary=True)),
            ],
        )
        assert await group.wait() == [6, None, None]
        assert [job.info.state for job in group] == [JobState.SUCCEEDED, JobState.STOPPED, JobState.STOPPED]


async def test_a_failed_group_escalates_once_by_its_first_cause() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            await scope.launch_group([work("a", boom, 0.05), work("b", stay), work("c", stay)])
    (scoped,) = caught.value.exceptions if isinstance(caught.value.exceptions[0], ExceptionGroup) else (caught.value,)
    assert [type(error) for error in scoped.exceptions] == [Boom]


async def test_what_the_group_absorbs_does_not_reach_the_scope() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
        group = await scope.launch_group(
            [work("a", double, 1, role="lead"), work("b", boom, role=JobRole("helper", auxiliary=True))],
            JobGroupConfig(auxiliary_failure="absorb", success="primary"),
        )
        assert await group.wait() == [2, None]
        await group[1].wait_ended()
    async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
        group = await scope.launch_group([work("a", boom), work("b", double, 2)], JobGroupConfig(success="any"))
        assert await group.wait() == [None, 4]


async def test_waiting_for_a_failed_group_raises_what_failed_it() -> None:
    async with fray.open_cluster("local") as cluster:
        group = await cluster.launch_group([work("a", boom, 0.05), work("b", stay)], JobGroupConfig("rl"))
        with pytest.raises(Boom):
            await group.wait()
        info = await group.info()
        assert info.decided_by == group[0].id
        assert "loss is NaN" in str(info.error_message)
        again = await cluster.launch_group([work("a", stay), work("b", stay)], JobGroupConfig("rl"))
        await again.terminate("enough")
        with pytest.raises(JobStopped):
            await again.wait()
        third = await cluster.launch_group([work("a", stay), work("b", stay)], JobGroupConfig("rl"))
        assert len(await cluster.terminate(group="rl")) == 2
        assert (await third.wait_ended()).state == JobState.STOPPED


async def test_a_scope_that_is_left_by_an_error_ends_its_groups() -> None:
    async with fray.open_cluster("local") as cluster:
        with pytest.raises(ExceptionGroup):
            async with cluster.open_scope() as scope:
                group = await scope.launch_group([work("a", stay), work("b", stay)])
                raise Boom
        assert [job.info.state for job in group] == [JobState.STOPPED] * 2


async def report() -> tuple[str, str, list[str]]:
    me = fray.current_job()
    await trio.lowlevel.checkpoint()
    return me.group, me.role, sorted(me.mates)


async def test_members_get_their_group_and_role() -> None:
    async with fray.open_cluster("local") as cluster:
        group = await cluster.launch_group(
            [work("a", report, role="head", ports=["http"]), work("b", report, role="rollout")], JobGroupConfig("rl-1")
        )
        assert await group.wait() == [("rl-1", "head", ["head"]), ("rl-1", "rollout", ["head"])]
        assert await (await cluster.launch(work("c", report))).wait() == ("", "", [])


async def test_invalid_groups_are_refused_and_not_launched() -> None:
    async with fray.open_cluster("local") as cluster:
        for requests, config, message in [
            ([], None, "at least one JobRequest"),
            ([work("a", stay)], "rl", "needs a JobGroupConfig"),
            ([work("a", stay), work("a", stay)], None, "uses it twice"),
            ([work("a", stay, role=JobRole("x", auxiliary=True))], None, "at least one must be primary"),
        ]:
            with pytest.raises((InvalidRequest, fray.NameInUse), match=message):
                await cluster.launch_group(requests, config)  # type: ignore[arg-type]
        huge = JobRequest("huge", ResourceConfig(cpu=1_000_000), Entrypoint.from_callable(stay))
        with pytest.raises(NeverSchedulable):
            await cluster.launch_group([work("a", stay), huge])
        with pytest.raises(InvalidRequest, match="use launch_group"):
            await cluster.launch(work("a", stay, role="head"))
        with pytest.raises(InvalidRequest, match="must be a name or a JobRole"):
            work("a", stay, role=3)
        assert await cluster.list_jobs() == []


async def test_a_group_may_have_a_namespace() -> None:
    async with fray.open_cluster("local") as cluster:
        group = await cluster.launch_group([work("a", double, 1)], JobGroupConfig("rl", namespace="team"))
        assert group[0].info.namespace == "team" or (await cluster.poll(group[0])).namespace == "team"
        assert [each.name for each in await cluster.list_groups("team")] == ["rl"]
        await group.wait()


def answer(number: int) -> int:
    return number + 1


def test_sync_code_launches_groups() -> None:
    from fray.blocking import open_cluster

    with open_cluster("local") as cluster:
        jobs = cluster.launch_group(
            [work("coordinator", answer, 1), work("worker-1", answer, 2)], group=JobGroupConfig(same_region=True)
        )
        assert jobs.wait(timeout=10) == [2, 3]
        assert [job.name for job in jobs] == ["coordinator", "worker-1"]
        assert jobs.info().state == "succeeded"
        assert [each.group_id for each in cluster.list_groups()] == [jobs.id]
