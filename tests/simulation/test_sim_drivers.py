"""Drivers that come and go: suspended, cut off, killed; what each kind of waiter gets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from fray import (
    ActorDied,
    Cluster,
    EndReason,
    Entrypoint,
    JobRequest,
    JobState,
    SessionEnded,
    Unreachable,
    current_cluster,
)
from fray.api.actors.handle import actor_id_of
from fray.model.resources import Capacity
from fray.runtime.controller_client.jobs import JobTracker
from fray.scheduler.state.rows import SchedulerConfig
from fray.testing.fakes import SimNetwork
from fray.testing.ground_truth import GroundTruth
from fray.testing.seed import Seed, Trace, steady
from fray.testing.sim_cluster import (
    CONTROLLER,
    DriverProcess,
    MachineSpec,
    SimCluster,
    open_sim_cluster,
)
from tests.simulation import workloads
from tests.simulation.workloads import SMALL, Counter, request

GB = 2**30
HOUR_S = 3600.0


def run_scenario(scenario: Callable[[SimCluster], Awaitable[None]], *, machines: int = 2) -> list[str]:
    """Run a scenario on a simulated cluster, on a virtual clock, and return the broken promises as text."""
    breaches: list[str] = []

    async def main() -> None:
        seed, trace = Seed(1), Trace()
        network, truth = SimNetwork(seed.stream("network"), trace), GroundTruth(trio.current_time)
        capacity = Capacity(cpu_milli=8000, memory_bytes=16 * GB, disk_bytes=GB)
        specs = [MachineSpec(f"m{number}", capacity) for number in range(machines)]
        with workloads.book(truth):
            async with open_sim_cluster(seed, network, truth, specs, rules=SchedulerConfig()) as sim:
                await scenario(sim)
        breaches.extend(breach.text for breach in truth.breaches)

    with steady(Seed(1)):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return breaches


def lingering(name: str, **more: Any) -> JobRequest:
    return JobRequest(
        name=name, entrypoint=Entrypoint.from_callable(workloads.linger, (name, 0.0)), resources=SMALL, **more
    )


async def drive(
    sim: SimCluster,
    name: str,
    body: Callable[[Cluster], Awaitable[None]],
    *,
    namespace: str | None = None,
    grace_s: float | None = None,
) -> BaseException | None:
    """Run one driver to its end, and return the result of its block."""
    try:
        await DriverProcess(sim, name).run(body, namespace=namespace, grace_s=grace_s)
    except BaseException as error:  # noqa: BLE001 - it is what the test looks at
        return error
    return None


class StreamingCounter(Counter):
    """Counter that also streams."""

    async def naturals(self, every_s: float) -> AsyncIterator[int]:
        number = 0
        while True:
            number += 1
            yield number
            await trio.sleep(every_s)


class Notes:
    """Result of each waiter of a driver, by its name."""

    def __init__(self) -> None:
        self.got: dict[str, object] = {}

    async def of(self, name: str, wait: Callable[[], Awaitable[object]]) -> None:
        try:
            self.got[name] = await wait()
        except trio.Cancelled:
            self.got.setdefault(name, "cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - noted
            self.got[name] = error


async def asleep(sim: SimCluster, machine: str, span_s: float) -> None:
    sim.freezer.freeze(machine)
    await trio.sleep(span_s)
    sim.freezer.thaw(machine)


# A laptop that sleeps ------------------------------------------------------------------------------------------------


class Laptop:
    """Driver with one waiter of each kind."""

    def __init__(self, sim: SimCluster) -> None:
        self.sim = sim
        self.notes = Notes()
        self.ready = trio.Event()
        self.error: BaseException | None = None
        self.left_at = 0.0

    async def live(self, *, grace_s: float | None = None) -> None:
        self.error = await drive(self.sim, "laptop", self.body, grace_s=grace_s)
        self.left_at = trio.current_time()

    async def body(self, cluster: Cluster) -> None:
        self.job = await cluster.launch(lingering("owned"))
        self.kept = await cluster.launch(lingering("kept", detached=True))
        self.actor = await cluster.create_actor(StreamingCounter, name="counter")
        assert await self.actor.add("first") == 1
        await self.job.wait_running()
        await self.kept.wait_running()
        async with trio.open_nursery() as nursery:
            for name, wait in self.waits(cluster).items():
                nursery.start_soon(self.notes.of, name, wait)
            await trio.sleep(1)
            self.ready.set()

    def waits(self, cluster: Cluster) -> dict[str, Callable[[], Awaitable[object]]]:
        async def scope() -> object:
            async with cluster.open_scope("inner") as inner:
                await inner.launch(lingering("in-scope-1"))
                await inner.launch(lingering("in-scope-2"))
            return "left"

        async def stream() -> object:
            async with self.actor.naturals.stream(0.5) as items:
                async for _ in items:
                    pass
            return "over"

        return {
            "job.wait": self.job.wait,
            "job.wait_ended": self.job.wait_ended,
            "cluster.wait": lambda: cluster.wait([self.job, self.kept]),
            "monitor": lambda: cluster.monitor(self.job),
            "scope": scope,
            "call": lambda: self.actor.slow_add("nap", 100_000.0),
            "stream": stream,
        }


def ended_s(sim: SimCluster, job_id: str) -> float:
    """Return when the last process of a job really ended."""
    lives = sim.truth.of_job[job_id]
    assert all(life.ended is not None for life in lives)
    return max(life.ended or 0.0 for life in lives)


def test_a_driver_suspended_for_an_hour_finds_its_session_ended_and_no_waiter_hangs() -> None:
    async def scenario(sim: SimCluster) -> None:
        laptop = Laptop(sim)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(laptop.live)
            await laptop.ready.wait()
            slept_at = trio.current_time()
            await asleep(sim, "laptop", HOUR_S)
            woke_at = trio.current_time()
        # 1. The session ended while it slept, with all it owned: after 3/4 of the grace the silence is noticed, then
        #    the grace passes, then the termination policy of 5 s.
        for job_id in (laptop.job.id, actor_id_of(laptop.actor)):
            assert 30 <= ended_s(sim, job_id) - slept_at <= 0.75 * 30 + 7.5 + 30 + 5 + 1
        # 2. It learns that within a second of waking up, once, as one error that says when, why,
        #    what lives on, and what to do.
        error = laptop.error
        assert type(error) is SessionEnded
        assert laptop.left_at - woke_at <= 1
        text = str(error)
        assert "ago, at 2023-11-1" in text
        assert "the driver was gone for 30 s; what it owned has ended with it" in text
        assert f"Detached jobs still run: {laptop.kept.id}" in text
        assert text.endswith(
            "Open the cluster again; open_cluster(grace_s=...) allows a driver to stay away for longer"
        )
        assert error.details["survivors"] == [laptop.kept.id]
        assert 3500 <= woke_at - (error.details["ended_at"] - 1_700_000_000) <= 3600
        # 3. Each kind of waiter got that error itself; calls got the last word of their actor, which lay in the socket.
        for name in ("job.wait", "job.wait_ended", "cluster.wait", "monitor", "scope"):
            got: Any = laptop.notes.got[name]
            leaves = got.exceptions if isinstance(got, BaseExceptionGroup) else [got]
            assert [(type(each), str(each)) for each in leaves] == [(SessionEnded, text)], f"{name}: {got!r}"
        for name in ("call", "stream"):
            assert isinstance(laptop.notes.got[name], ActorDied)
            assert "was shut down while" in str(laptop.notes.got[name])
        # 4. A fresh open works, finds by its name what was detached, and can end it.
        await adopted(sim, laptop.kept.id)

    assert not run_scenario(scenario)


async def adopted(sim: SimCluster, job_id: str) -> None:
    async def body(cluster: Cluster) -> None:
        kept = await cluster.get_job("kept")
        assert (kept.id, kept.info.state) == (job_id, JobState.RUNNING)
        await kept.terminate("not needed any more")
        assert (await kept.wait_ended()).state is JobState.STOPPED
        assert [info.state for info in await cluster.list_jobs("*", states=["running"])] == []
        fresh = await cluster.launch(request("fresh", workloads.give, "fresh", 7, 0.1))
        assert await fresh.wait() == 7

    assert await drive(sim, "laptop-again", body) is None


@pytest.mark.parametrize(("grace_s", "nap_s"), [(None, 25.0), (2 * HOUR_S, HOUR_S)], ids=["short nap", "long grace"])
def test_a_driver_suspended_for_less_than_its_grace_resumes_and_everything_continues(
    grace_s: float | None, nap_s: float
) -> None:
    async def scenario(sim: SimCluster) -> None:
        done = []

        async def body(cluster: Cluster) -> None:
            actor = await cluster.create_actor(StreamingCounter, name="counter")
            job = await cluster.launch(request("long", workloads.give, "long", 5, nap_s + 100))
            nap = actor.slow_add.start("nap", nap_s + 50)
            ready.set()
            done.append(await job.wait())
            done.append(await nap)
            done.append(await actor.add("after"))

        ready = trio.Event()
        async with trio.open_nursery() as nursery:

            async def live() -> None:
                assert await drive(sim, "laptop", body, grace_s=grace_s) is None

            nursery.start_soon(live)
            await ready.wait()
            await asleep(sim, "laptop", nap_s)
        assert done == [5, 1, 2]

    assert not run_scenario(scenario)


# A driver that is killed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace_s", [0.0, 5.0, 100.0])
def test_nothing_outlives_a_driver_that_is_gone_by_more_than_its_grace_and_termination_steps(grace_s: float) -> None:
    """Connections break at once, so there is no silence to notice."""

    async def scenario(sim: SimCluster) -> None:
        driver, ready, made = DriverProcess(sim, "driver"), trio.Event(), []

        async def body(cluster: Cluster) -> None:
            job = await cluster.launch(request("parent", launch_child, "child"))
            made.append(job.id)
            while len(running := await cluster.list_jobs(states=["running"])) < 2:  # noqa: ASYNC110
                await trio.sleep(0.1)
            made.extend(info.job_id for info in running if info.name == "child")
            ready.set()
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(driver.run, body, namespace=None, grace_s=grace_s))
            await ready.wait()
            killed_at = trio.current_time()
            driver.kill()
        await trio.sleep(grace_s + 10)
        for job_id in made:
            assert grace_s <= ended_s(sim, job_id) - killed_at <= grace_s + 6

    assert not run_scenario(scenario)


async def launch_child(name: str) -> None:
    async with current_cluster().open_scope("inner") as scope:
        await scope.launch(lingering(name))


# Others that sleep ---------------------------------------------------------------------------------------------------


def test_a_controller_suspended_for_less_than_the_lease_is_a_pause() -> None:
    async def scenario(sim: SimCluster) -> None:
        async def body(cluster: Cluster) -> None:
            actor = await cluster.create_actor(StreamingCounter, name="counter")
            job = await cluster.launch(request("across", workloads.give, "across", 5, 200.0))
            assert await actor.add("before") == 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asleep, sim, CONTROLLER, 500.0)
                await trio.sleep(100)
                assert await actor.add("meanwhile") == 2, "calls never pass through it"
                assert await job.wait() == 5
            after = await cluster.launch(request("after", workloads.give, "after", 6, 0.1))
            assert await after.wait() == 6
            assert len((await cluster.poll(job)).attempts) == 1

        assert await drive(sim, "driver", body) is None

    assert not run_scenario(scenario)


def test_a_controller_suspended_for_an_hour_is_given_up_and_resumes_without_jobs() -> None:
    async def scenario(sim: SimCluster) -> None:
        made = []

        async def body(cluster: Cluster) -> None:
            job = await cluster.launch(lingering("owned"))
            made.append(job.id)
            await job.wait_running()
            sim.nursery.start_soon(asleep, sim, CONTROLLER, HOUR_S)
            await job.wait()

        began = trio.current_time()
        error = await drive(sim, "driver", body)
        assert type(error) is Unreachable
        assert "no connection to" in str(error)
        assert 590 <= trio.current_time() - began <= 670
        await trio.sleep(HOUR_S)
        first, *others = sim.truth.of_job[made[0]]
        assert 480 <= (first.ended or 0) - began <= 600, "its node gave the controller up within its lease"
        assert all((one.ended or 0) <= HOUR_S + 40 for one in others), "restarted when it resumed; ended"

        async def again(cluster: Cluster) -> None:
            await trio.sleep(60)
            (info,) = await cluster.list_jobs("*")
            assert info.state is JobState.STOPPED
            assert "the driver was gone for 30 s" in (info.error_message or "")
            assert len(await cluster.wait_for_nodes(2)) == 2

        assert await drive(sim, "driver-again", again) is None

    assert not run_scenario(scenario)


def test_a_machine_suspended_beyond_its_lease_holds_nothing_when_it_resumes_and_its_job_runs_elsewhere() -> None:
    async def scenario(sim: SimCluster) -> None:
        async def body(cluster: Cluster) -> None:
            job = await cluster.launch(request("moved", workloads.give, "moved", 5, 1000.0))
            first = (await job.wait_running()).attempts[0].node
            await asleep(sim, first, HOUR_S)
            assert await job.wait() == 5
            attempts = (await cluster.poll(job)).attempts
            assert [(one.node == first, one.cause) for one in attempts] == [
                (True, EndReason.MACHINE_LOST),
                (False, EndReason.SUCCEEDED),
            ]
            await trio.sleep(10)
            assert all(node.alive for node in await cluster.nodes())
            old, new = sim.truth.of_job[job.id]
            assert new.began == pytest.approx(600, abs=1), "the loss is known when the lease expires"
            assert (old.ended or 0) - HOUR_S <= 2, "it woke up beside its successor, and was ended at once"

        assert await drive(sim, "driver", body) is None

    assert not run_scenario(scenario)


# A controller that is away at the wrong moment -----------------------------------------------------------------------


def test_jobs_of_a_scope_that_ended_while_the_controller_was_away_end_when_it_is_back() -> None:
    async def scenario(sim: SimCluster) -> None:
        async def body(cluster: Cluster) -> None:
            with trio.CancelScope() as cancel:
                async with cluster.open_scope("run") as scope:
                    job = await scope.launch(lingering("child"))
                    await job.wait_running()
                    await sim.controller.crash()
                    cancel.cancel()
            assert ended_is_unknown(sim, job.id), "the scope has given up waiting for a controller"
            await trio.sleep(20)
            await sim.controller.start()
            await trio.sleep(20)
            assert not ended_is_unknown(sim, job.id)

        assert await drive(sim, "driver", body) is None

    assert not run_scenario(scenario)


def ended_is_unknown(sim: SimCluster, job_id: str) -> bool:
    return any(life.ended is None for life in sim.truth.of_job[job_id])


def test_a_controller_that_crashes_again_during_resubscription_loses_no_waiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[trio.Event] = []

    async def resubscribe(self: JobTracker) -> None:
        for event in begun:
            event.set()
        await really(self)

    really = JobTracker.resubscribe
    monkeypatch.setattr(JobTracker, "resubscribe", resubscribe)

    async def scenario(sim: SimCluster) -> None:
        async def body(cluster: Cluster) -> None:
            jobs = [
                await cluster.launch(workloads.request(f"j{number}", workloads.give, f"j{number}", number, 30.0))
                for number in range(12)
            ]
            begun.append(trio.Event())
            await sim.controller.crash()
            await sim.controller.start()
            await begun[0].wait()
            await trio.sleep(0.03)  # some are followed again, others not yet
            await sim.controller.crash()
            await sim.controller.start()
            with trio.fail_after(60):
                assert [await job.wait() for job in jobs] == list(range(12))

        assert await drive(sim, "driver", body) is None

    assert not run_scenario(scenario)
