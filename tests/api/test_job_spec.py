"""Many jobs of one request, chosen job ids, and adopted jobs; in a local cluster on a virtual clock."""

from __future__ import annotations

import random

import pytest
import trio

import fray
import fray.blocking
from fray import Entrypoint, InvalidRequest, JobRequest, NameInUse, NoSuchJob, ResourceConfig
from fray.model.ids import mint_name, stem_of
from fray.model.policy.name_templates import common_part, expand

TINY = ResourceConfig(cpu=0.001, memory="1MB")


async def double(number: int) -> int:
    await trio.lowlevel.checkpoint()
    return 2 * number


async def stay() -> None:
    await trio.sleep_forever()


def work(fn: object, *args: object, **more: object) -> JobRequest:
    return JobRequest("work", TINY, Entrypoint.from_callable(fn, args), **more)  # type: ignore[arg-type]


# Names


def test_generated_names_of_one_label_have_one_stem() -> None:
    rng = random.Random(1)
    made_up = [mint_name("Link", rng) for _ in range(1000)]
    assert len(set(made_up)) > 990
    assert {stem_of(name) for name in made_up} == {"Link"}
    assert {stem_of(f"{name}-{index}") for index, name in enumerate(made_up)} == {"Link-"}
    for name in ("train-better", "sweep-server", "rl/rollout", "resnet-abc", "-"):
        assert stem_of(name) == name, "words of people stay, but for digits"
    assert stem_of("sweep-17") == stem_of("sweep-4") == "sweep-"


def test_a_pattern_may_have_a_user_and_an_index_only() -> None:
    assert expand("{user}/rl/rollout/{index}", 3, "alice") == [f"alice/rl/rollout/{n}" for n in range(3)]
    assert expand("w-{index:03d}", 2, "") == ["w-000", "w-001"]
    assert expand("{user}/train", None, "Alice B.") == ["Alice-B/train"]
    assert common_part("{user}/rl/rollout/{index}", "alice") == "alice/rl/rollout"
    for pattern, count, expected in [
        ("{host}/{index}", 2, r"has \{host\}: only \{user\}"),
        ("{index!r}", 2, r"has \{index!r\}"),
        ("{user:>9}", None, r"has \{user:>9\}"),
        ("{index:x}", 2, r"has \{index:x\}"),
        ("{", 2, "cannot be read"),
        ("{index}", None, "say how many with count="),
        ("train", 2, r"write 'train/\{index\}'"),
        ("{index}", 0, "count=0 must be 1 to 10000"),
        ("a b {index}", 1, "cannot be the name"),
    ]:
        with pytest.raises(InvalidRequest, match=expected):
            expand(pattern, count, "alice")


# Launches


def test_a_template_launches_many_jobs_which_terminate_by_prefix() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
            jobs = await scope.launch(work(double, 4), count=20, name="{user}/double/{index:02d}")
            assert [job.name.partition("/")[2] for job in jobs] == [f"double/{n:02d}" for n in range(20)]
            assert len({job.id for job in jobs}) == 20
            assert [await job.wait() for job in jobs] == [8] * 20

            stayers = await scope.launch(work(stay), count=5)
            assert [job.name for job in stayers] == [f"work/{n}" for n in range(5)]
            assert await cluster.terminate(prefix="work/") == [job.id for job in stayers]
            assert await cluster.terminate(prefix="work/") == []
            ends = [await job.wait_ended() for job in stayers]
            assert {end.cause for end in ends} == {"stopped"}
            assert all(end.ended_by.startswith("driver ") for end in ends)

    trio.run(main)


def test_all_of_a_template_are_launched_or_none() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            await cluster.launch(work(double, 1), name="w/2")
            blocked = await cluster.launch(work(stay), name="v/2")
            with pytest.raises(NameInUse):
                await cluster.launch(work(stay), count=4, name="v/{index}")
            assert [info.name for info in await cluster.list_jobs()] == ["w/2", "v/2"]
            await blocked.terminate()

    trio.run(main)


def test_launching_a_job_id_again_returns_the_same_job() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            first = await cluster.launch(work(double, 4), job_id="work-run1")
            second = await cluster.launch(work(double, 4), job_id="work-run1")
            assert first.id == second.id == "work-run1"
            assert (await first.wait(), await second.wait()) == (8, 8)
            third = await cluster.launch(work(double, 4), job_id="work-run1")
            assert await third.wait() == 8
            with pytest.raises(InvalidRequest, match="it differs in entrypoint or its arguments"):
                await cluster.launch(work(double, 5), job_id="work-run1")
            with pytest.raises(InvalidRequest, match="'work-run1'"):
                await cluster.launch(work(double, 4), job_id="run1")
            assert len(await cluster.list_jobs()) == 1

    trio.run(main)


def test_a_refused_launch_under_a_living_jobs_id_leaves_that_job_alone() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            job = await cluster.launch(work(stay), job_id="work-run1")
            await job.wait_running()
            async with cluster.open_scope("other") as scope:
                with pytest.raises(InvalidRequest):
                    await scope.launch(work(double, 5), job_id="work-run1")
            assert (await cluster.poll(job)).state == "running"
            await job.terminate()

    trio.run(main)


def test_an_adopted_job_can_be_awaited_and_keeps_its_owner() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope("first") as first:
            owned = await first.launch(work(stay), name="{user}/serve")
            async with cluster.open_scope("second") as second:
                adopted = await second.launch(work(stay), name="{user}/serve", adopt_existing=True)
                assert adopted.id == owned.id
                with pytest.raises(NameInUse, match="differs in entrypoint"):
                    await second.launch(work(double, 1), name="{user}/serve", adopt_existing=True)
            assert (await cluster.poll(owned)).state != "stopped"  # the adopter's scope did not end it
            await cluster.terminate(name=owned.name)
            assert (await adopted.wait_ended()).cause == "stopped"

    trio.run(main)


def test_a_detached_job_is_found_by_its_name_with_its_result() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            job = await cluster.launch(work(double, 21, detached=True), name="lab/double")
            assert job.info.namespace == "lab/double"
            assert await (await cluster.get_job("lab/double")).wait() == 42
            assert await (await cluster.get_job(job.id)).wait() == 42
            many = await cluster.launch(work(double, 1, detached=True), count=2, name="lab/many/{index}")
            assert [each.info.namespace for each in many] == ["lab/many"] * 2
            assert await (await cluster.get_job("lab/many/1")).wait() == 2
            with pytest.raises(NoSuchJob, match="no job 'missing'"):
                await cluster.get_job("missing")
            with pytest.raises(InvalidRequest, match="must not be empty"):
                await cluster.terminate(prefix="")

    trio.run(main)


def test_sync_code_has_templates_too() -> None:
    with fray.blocking.open_cluster("local") as cluster:
        jobs = cluster.launch(work(double, 3), count=3, name="{user}/d/{index}")
        assert [job.wait(30) for job in jobs] == [6, 6, 6]
        assert cluster.get_job(jobs[1].name).id == jobs[1].id
        assert cluster.get_job(jobs[2].id).wait(30) == 6
        assert cluster.terminate(prefix="missing/") == []
        with cluster.open_scope("s") as scope:
            assert scope.launch(work(double, 3), job_id="work-1").wait(30) == 6
