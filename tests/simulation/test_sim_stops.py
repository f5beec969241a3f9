"""Machines that are stopped beyond their lease, as SIGSTOP does it: what they find as they wake holds no more.

On a virtual clock; the lease is 600 s, so whatever lived there lives elsewhere long before they wake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

import fray
from fray import Cluster
from fray.model.resources import Capacity
from fray.net.channel.dialer import AFTER_SUSPENSION_S
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
from tests.simulation.workloads import Counter, request

GB = 2**30
STOP_S = 700.0
Patch = pytest.MonkeyPatch


def played(body: Callable[[SimCluster, Cluster], Awaitable[None]]) -> list[str]:
    """One driver on a cluster of two machines; returns the promises that were broken, in words."""
    breaches: list[str] = []

    async def main() -> None:
        seed, trace = Seed(1), Trace()
        network, truth = SimNetwork(seed.stream("network"), trace), GroundTruth(trio.current_time)
        capacity = Capacity(cpu_milli=8000, memory_bytes=16 * GB, disk_bytes=GB)
        specs = [MachineSpec(f"m{number}", capacity) for number in range(2)]
        with workloads.book(truth):
            async with open_sim_cluster(seed, network, truth, specs, rules=SchedulerConfig()) as sim:
                driver = DriverProcess(sim, "driver")
                await driver.run(lambda cluster: body(sim, cluster), namespace=None, grace_s=30.0)
        breaches.extend(breach.text for breach in truth.breaches)

    with steady(Seed(1)):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return breaches


async def stopped(sim: SimCluster, machine: str, span_s: float = STOP_S) -> None:
    sim.freezer.freeze(machine)
    await trio.sleep(span_s)
    sim.freezer.thaw(machine)


async def call_while_it_is_stopped(sim: SimCluster, cluster: Cluster) -> None:
    """The call lies in the actor's socket until the machine wakes; its caller has long been told that it is lost."""
    counter = await cluster.create_actor(Counter, name="counter", max_restarts=1)
    assert await counter.add("before") == 1
    (life,) = sim.truth.living.values()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stopped, sim, life.machine)
        with pytest.raises(fray.FrayError):
            await counter.add("buffered")
    await trio.sleep(60)
    assert await counter.add("after") == 1, "it was made anew"
    assert life.ended is not None
    (run,) = sim.truth.runs["after"]
    assert run.incarnation != life.attempt_id


def test_a_call_that_lay_before_a_stopped_actor_is_not_run_when_it_wakes() -> None:
    assert not played(call_while_it_is_stopped)


def test_a_host_that_reads_old_calls_is_seen(monkeypatch: Patch) -> None:
    monkeypatch.setattr("fray.runtime.actors.caller_session.STALE_S", float("inf"))
    assert any("buffered was executed" in text for text in played(call_while_it_is_stopped))


def test_callers_that_come_back_are_let_in_once_the_host_knows_that_it_still_may() -> None:
    async def body(sim: SimCluster, cluster: Cluster) -> None:
        counter = await cluster.create_actor(Counter, name="counter")
        assert await counter.add("before") == 1
        (life,) = sim.truth.living.values()
        await stopped(sim, life.machine, 200.0)  # less than the lease
        await trio.sleep(5)
        assert await counter.add("after") == 2
        assert life.ended is None

    assert not played(body)


def test_what_was_about_to_begin_on_a_stopped_machine_does_not_begin_when_it_wakes() -> None:
    async def body(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(request("late", workloads.give, "late", 7, 1.0))
        machine = await holder_of(sim)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stopped, sim, machine)
            assert await job.wait() == 7
        await trio.sleep(30)
        assert [life.generation for life in sim.truth.of_job[job.id]] == [1]

    assert not played(body)


async def holder_of(sim: SimCluster) -> str:
    """The machine that has been told of an attempt and has not begun it."""
    while True:
        for name, machine in sim.machines.items():
            if machine.launcher is not None and machine.launcher.held:
                assert not list(sim.truth.on(name))
                return name
        await trio.sleep(0.0001)


def test_a_machine_that_wakes_where_no_controller_can_be_reached_ends_what_it_holds() -> None:
    async def body(sim: SimCluster, cluster: Cluster) -> None:
        await cluster.launch(request("stays", workloads.linger, "stays", 0.0, detached=True, max_retries_failure=0))
        await trio.sleep(1)
        (life,) = sim.truth.living.values()
        sim.freezer.freeze(life.machine)
        sim.network.cut(life.machine, CONTROLLER, both=True)
        await trio.sleep(STOP_S)
        sim.freezer.thaw(life.machine)
        woke_at = trio.current_time()
        await trio.sleep(AFTER_SUSPENSION_S + 10.0)
        sim.network.heal(life.machine, CONTROLLER)
        assert life.ended is not None
        assert life.ended <= woke_at + AFTER_SUSPENSION_S + 5.0
        await cluster.terminate("stays")

    assert not played(body)
