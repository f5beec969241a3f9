"""Supervised groups, hooks and restarts of the async API, in ``local``."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.lowlevel

import fray
from fray import ActorConfig, ActorStatus, InvalidRequest, RemoteError
from tests.api.test_names import Counter, running


async def kill(counter: fray.ActorHandle) -> None:
    with pytest.raises(RemoteError, match="SystemExit"):
        await counter.die()


def children(*names: str) -> list[fray.ChildSpec]:
    return [fray.child(Counter, 10 * index, name=name) for index, name in enumerate(names)]


def test_one_for_all_restarts_all_together() -> None:
    async def test(cluster: fray.Cluster) -> None:
        async with cluster.open_scope("s") as scope:
            a, b, c = await scope.supervise(children("a", "b", "c"), strategy="one_for_all")
            assert [await one.add(1) for one in (a, b, c)] == [1, 11, 21]
            await kill(b)
            with trio.fail_after(5):
                while [info.restarts for info in await cluster.list_actors()] != [1, 1, 1]:
                    await trio.lowlevel.checkpoint()
            assert [await one.add(1) for one in (a, b, c)] == [1, 11, 21]
            assert [info.restarts for info in await cluster.list_actors()] == [1, 1, 1]

    running(test)


def test_rest_for_one_leaves_those_before_running() -> None:
    async def test(cluster: fray.Cluster) -> None:
        async with cluster.open_scope("s") as scope:
            a, b, c = await scope.supervise(children("a", "b", "c"), strategy="rest_for_one")
            assert [await one.add(1) for one in (a, b, c)] == [1, 11, 21]
            await kill(b)
            with trio.fail_after(5):
                while [info.restarts for info in await cluster.list_actors()] != [0, 1, 1]:
                    await trio.lowlevel.checkpoint()
            assert [await one.add(1) for one in (a, b, c)] == [2, 11, 21]

    running(test)


def test_a_group_that_fails_too_often_ends_and_raises_once() -> None:
    async def test(cluster: fray.Cluster) -> None:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with cluster.open_scope("s") as scope:
                a, b = await scope.supervise(children("a", "b"), strategy="one_for_one", max_restarts=1)
                await kill(a)
                await a.add(1)
                await kill(b)
                await trio.sleep_forever()
        assert len(caught.value.exceptions) == 1
        assert "SystemExit" in str(caught.value.exceptions[0])
        assert await cluster.actor_status("b") is ActorStatus.FAILED
        assert "its group was restarted once" in (await cluster.actor_info("b")).reason
        assert await cluster.actor_status("a") is ActorStatus.ENDED
        assert "its group ended" in (await cluster.actor_info("a")).reason

    running(test)


def test_a_hook_decides_what_a_failure_does() -> None:
    calls: list[Any] = []

    async def test(cluster: fray.Cluster) -> None:
        def absorbing(child: fray.ActorHandle | fray.Job, error: BaseException) -> str:
            calls.append((child, str(error)))
            return "absorb"

        async with cluster.open_scope("s") as scope:
            counter = await scope.create_actor(Counter, name="c", on_failure=absorbing)
            job = await scope.launch(
                fray.JobRequest(name="j", entrypoint=fray.Entrypoint.from_callable(int, args=("x",))),
                on_failure=absorbing,
            )
            await kill(counter)
            await job.wait_ended()
            with trio.fail_after(5):
                while len(calls) < 2:
                    await trio.lowlevel.checkpoint()
        assert {type(child) for child, _ in calls} == {fray.ActorHandle, fray.Job}
        with pytest.raises(BaseExceptionGroup):
            async with cluster.open_scope("s") as scope:
                counter = await scope.create_actor(Counter, on_failure=lambda child, error: "escalate")
                await kill(counter)
                await trio.sleep_forever()

    running(test)


def test_a_hook_that_returns_anything_else_fails_the_scope_with_the_valid_values() -> None:
    async def test(cluster: fray.Cluster) -> None:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with cluster.open_scope("s") as scope:
                counter = await scope.create_actor(Counter, on_failure=lambda child, error: None)  # type: ignore[arg-type]
                await kill(counter)
                await trio.sleep_forever()
        (error,) = caught.value.exceptions
        assert isinstance(error, InvalidRequest)
        assert 'return "escalate" or "absorb"' in str(error)
        assert error.__cause__ is not None

    running(test)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"strategy": "all_for_one"}, "must be one of 'one_for_one', 'one_for_all', 'rest_for_one'"),
        ({"children": []}, "at least one"),
        ({"children": [Counter]}, "a list of fray.child"),
        ({"children": [fray.child(Counter, actor_config=ActorConfig(max_restarts=1))]}, "counted for the whole group"),
        ({"max_restarts": -2}, "0 or more, or -1"),
        ({"on_failure": "ignore"}, '"escalate", "absorb" or a function'),
    ],
)
def test_invalid_groups_are_refused(ask: dict[str, Any], says: str) -> None:
    async def test(cluster: fray.Cluster) -> None:
        async with cluster.open_scope("s") as scope:
            with pytest.raises(InvalidRequest, match=says):
                await scope.supervise(ask.pop("children", children("a")), **ask)
            assert await cluster.list_actors() == []

    running(test)


def test_an_actor_in_back_off_reports_it_and_its_calls_wait() -> None:
    async def test(cluster: fray.Cluster) -> None:
        config = ActorConfig(max_restarts=2, restart_period_s=60, backoff_s=0.2)
        counter = await cluster.create_actor(Counter, 5, name="c", actor_config=config)
        await kill(counter)
        with trio.fail_after(5):
            while not (info := await cluster.actor_info(counter)).reason.startswith("restarts in"):
                await trio.lowlevel.checkpoint()
        assert info.status is ActorStatus.RESTARTING
        assert await counter.add(1) == 6

    running(test)


def test_an_actor_that_waits_for_a_machine_longer_than_it_may_is_unschedulable() -> None:
    async def test(cluster: fray.Cluster) -> None:
        (machine,) = await cluster.nodes()
        await cluster.cordon(machine.name, reason="a fan is loud")
        counter = await cluster.create_actor(Counter, 1, actor_config=ActorConfig(wait_limit_s=0.1))
        with pytest.raises(fray.ActorDied, match=r"it waited 0.1 s for machines, its limit.*a fan is loud"):
            await counter.add(1)
        forecast = await cluster.what_if(fray.JobRequest("question"))
        assert forecast.verdict is fray.ForecastVerdict.WAIT

    running(test)


def test_a_drained_actor_restarts_when_its_machine_is_back() -> None:
    async def test(cluster: fray.Cluster) -> None:
        counter = await cluster.create_actor(Counter, 1, actor_config=ActorConfig(max_restarts=1))
        assert await counter.add(1) == 2
        (there,) = await cluster.nodes()
        (machine,) = (await cluster.drain(there.name, wait=True)).nodes
        assert machine.standing == "drained"
        await cluster.uncordon(machine.name)
        with trio.fail_after(5):
            assert await counter.add.options(idempotent=True)(1) == 2

    running(test)


class Patient:
    """Actor that sees the notice of its preemption."""

    def preempted(self) -> bool:
        return fray.current_job().preempted

    def leave(self) -> None:
        fray.current_actor().shutdown()


def test_an_actor_serves_calls_during_the_notice_of_its_preemption_and_may_end_before() -> None:
    async def test(cluster: fray.Cluster) -> None:
        patient = await cluster.create_actor(Patient, actor_config=ActorConfig(preemption_notice_s=600))
        assert not await patient.preempted()
        (there,) = await cluster.nodes()
        await cluster.drain(there.name)
        with trio.fail_after(5):
            while not await patient.preempted():
                await trio.lowlevel.checkpoint()
        await patient.leave()
        with trio.fail_after(5):
            await fray.monitor(patient)

    running(test)
    with pytest.raises(InvalidRequest, match="preemption_notice_s=-1 must be 0 or more seconds"):
        ActorConfig(preemption_notice_s=-1)
