"""Machines that are stopped beyond their lease, as by SIGSTOP: state from before does not count when they resume.

On a virtual clock; the lease is 600 s, so everything that lived there lives elsewhere long before they resume.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

import fray
from fray import Cluster
from fray.model.resources import Capacity
from fray.model.specs import EntryKind, JobSpec
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


def run_scenario(body: Callable[[SimCluster, Cluster], Awaitable[None]]) -> list[str]:
    """Run one driver on a cluster of two machines, and return the broken promises as text."""
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
    """Make a call that waits in the actor's socket until the machine resumes; its caller has long got an error."""
    counter = await cluster.create_actor(Counter, name="counter", max_restarts=1)
    assert await counter.add("before") == 1
    (life,) = sim.truth.living.values()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stopped, sim, life.machine)
        with pytest.raises(fray.FrayError):
            await counter.add("buffered")
    await trio.sleep(60)
    assert await counter.add("after") == 1, "it was restarted"
    assert life.ended is not None
    (run,) = sim.truth.runs["after"]
    assert run.incarnation != life.attempt_id


def test_a_call_that_waited_for_a_stopped_actor_is_not_run_when_it_resumes() -> None:
    assert not run_scenario(call_while_it_is_stopped)


def test_a_host_that_runs_old_calls_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr("fray.runtime.actors.caller_session.STALE_S", float("inf"))
    assert any("buffered was executed" in text for text in run_scenario(call_while_it_is_stopped))


@pytest.mark.parametrize(("since_s", "is_found"), [(0.01, False), (1.0, True)])
def test_a_process_of_a_machine_that_continues_just_now_may_live_beside_its_successor(
    since_s: float, is_found: bool
) -> None:
    # Seed 436 of tests/rl/actor_simulation.py; a defect of the simulator: the machine of the successor came back from a
    # power cut at the moment at which the other one continued.
    now = 0.0
    truth = GroundTruth(lambda: now)
    spec = JobSpec(job_id="a", name="a", namespace="n", entry=EntryKind.BINARY)
    truth.began("a:0:0", "m0", spec, ())
    truth.continued_at["m0"], now = 700.0, 700.0 + since_s
    truth.began("a:1:0", "m1", spec, ())
    assert bool(truth.breaches) is is_found


def test_callers_reconnect_once_the_host_has_confirmed_its_lease() -> None:
    async def body(sim: SimCluster, cluster: Cluster) -> None:
        counter = await cluster.create_actor(Counter, name="counter")
        assert await counter.add("before") == 1
        (life,) = sim.truth.living.values()
        await stopped(sim, life.machine, 200.0)  # less than the lease
        await trio.sleep(5)
        assert await counter.add("after") == 2
        assert life.ended is None

    assert not run_scenario(body)


def test_attempts_about_to_start_on_a_stopped_machine_do_not_start_when_it_resumes() -> None:
    async def body(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(request("late", workloads.give, "late", 7, 1.0))
        machine = await holder_of(sim)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stopped, sim, machine)
            assert await job.wait() == 7
        await trio.sleep(30)
        assert [life.generation for life in sim.truth.of_job[job.id]] == [1]

    assert not run_scenario(body)


async def holder_of(sim: SimCluster) -> str:
    """Return the machine that was asked to run an attempt and has not started it."""
    while True:
        for name, machine in sim.machines.items():
            if machine.launcher is not None and machine.launcher.held:
                assert not list(sim.truth.on(name))
                return name
        await trio.sleep(0.0001)


def test_a_machine_that_resumes_without_a_controller_ends_its_attempts() -> None:
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

    assert not run_scenario(body)
