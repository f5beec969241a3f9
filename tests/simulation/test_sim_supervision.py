"""Restarts, groups, exclusive names and stored states in simulation; each violated rule is found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

import fray
from fray import ActorStatus
from fray.scheduler.jobs import (
    checkpoints,
    retries,
    submit,
    supervision,
)
from fray.scheduler.jobs import (
    holds as holding,
)
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
from tests.simulation import operations as acts
from tests.simulation import scenario_plans, workloads
from tests.simulation.directed_plans import DIRECTED, draw_directed
from tests.simulation.run import run_seed
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan, draw_plan
from tests.simulation.workloads import Counter

Patch = pytest.MonkeyPatch


def breaches(result: ScenarioResult, promise: str) -> list[str]:
    return [breach.text for breach in result.breaches if breach.promise == promise]


def calm(*acts: str) -> ScenarioPlan:
    return direct_plan(acts, [])


def test_without_faults_no_promise_is_broken() -> None:
    kinds = (
        "supervised group",
        "crash loop",
        "stateful actor",
        "deleted actor",
        "replaced actor",
        "shared actor",
        "actors seen",
    )
    result = run_seed(1, plan=calm(*kinds, *kinds), gone_within_s=40)
    assert result.breaches == ()


def test_siblings_that_are_not_restarted_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(supervision, "_restart_others", lambda *arguments: None)
    assert any("has not ended" in text for text in breaches(run_seed(1, plan=calm(*["supervised group"] * 6)), "P2"))


def test_a_group_that_outlives_its_failure_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(supervision, "_end_group", lambda *arguments: None)
    monkeypatch.setattr(retries, "affordable_budget", lambda *arguments: None)
    found = breaches(run_seed(1, plan=calm("supervised group")), "invariant")
    assert any("a member of it continues" in text for text in found)


def test_a_back_off_that_is_not_respected_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(retries, "restart_delay_s", lambda *arguments: 0.0)
    assert any("begins 0." in text for text in breaches(run_seed(1, plan=calm(*["crash loop"] * 5)), "P2"))


def test_more_restarts_than_are_allowed_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(retries, "recent_restarts", lambda *arguments: [])
    assert any("was restarted" in text for text in breaches(run_seed(1, plan=calm("crash loop")), "invariant"))


def test_two_actors_of_one_name_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(holding, "blocking_jobs", lambda *arguments: iter(()))
    assert any(
        "had it first" in text for text in breaches(run_seed(1, plan=calm(*["replaced actor"] * 20)), "invariant")
    )


def test_a_second_of_a_name_whose_machine_falls_silent_is_waited_for_by_calls_that_may_be_repeated() -> None:
    faults = [(0.1, "slow link", 200.0), (8.0, "crash controller", 1.0), (9.5, "cut off", 60.0)]
    result = run_seed(3, plan=direct_plan(["replaced actor"] * 24, faults, machines=1, every_s=0.6))
    assert result.events["node suspect"]
    assert not result.outcomes
    assert result.breaches == ()


def test_a_state_that_was_confirmed_and_not_stored_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(checkpoints, "_store", lambda *arguments: None)
    assert any("are gone" in text for text in breaches(run_seed(1, plan=calm(*["stateful actor"] * 8)), "P7"))


def test_a_second_creator_that_is_refused_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(submit, "living_actor", lambda *arguments: None)
    assert any("NameInUse" in text for text in breaches(run_seed(1, plan=calm(*["shared actor"] * 9)), "error"))


def test_every_act_is_drawn_by_random_or_directed_scenarios_and_every_drawn_act_is_there() -> None:
    directed = {act.kind for name in DIRECTED for seed in range(3) for act in draw_directed(seed, name).acts}
    assert set(scenario_plans.ACTS) <= set(acts.ACTS)
    assert set(acts.ACTS) == set(scenario_plans.ACTS) | directed


def test_the_new_acts_are_part_of_the_random_scenarios() -> None:
    kinds = {act.kind for seed in range(20) for act in draw_plan(Seed(seed).stream("plan")).acts}
    assert {"supervised group", "stateful actor", "shared actor", "replaced actor"} <= kinds


# How soon an actor is back when its machine is gone -------------------------------------------------------------------


def run_on_machines(work: Callable[[fray.Cluster, SimCluster], Awaitable[None]], rules: SchedulerConfig) -> None:
    """Run ``work`` in a driver of a cluster of two machines."""
    seed = Seed(1)

    async def main() -> None:
        network = SimNetwork(seed.stream("network"), Trace())
        truth = GroundTruth(trio.current_time)
        capacity = draw_plan(seed.stream("plan")).machines[0]
        machines = [MachineSpec("m0", capacity), MachineSpec("m1", capacity)]
        with workloads.book(truth):
            async with open_sim_cluster(seed, network, truth, machines, rules=rules) as sim:
                driver = DriverProcess(sim, "driver")
                await driver.run(lambda cluster: work(cluster, sim), namespace="lab", grace_s=10.0)

    with steady(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def back_after_s(rules: SchedulerConfig, config: fray.ActorConfig) -> tuple[float, float]:
    """Return the seconds from a power cut until callers get its error, and until the first answer of the next
    incarnation."""
    found = []

    async def lose_it(cluster: fray.Cluster, sim: SimCluster) -> None:
        counter = await cluster.create_actor(Counter, name="c", max_restarts=1, actor_config=config)
        await counter.add("before")
        machine = sim.machines[(await cluster.actor_info(counter)).node]
        await trio.sleep(100)
        cut_at = trio.current_time()
        machine.kill(silent=True)
        reported_s = await since(cut_at, lambda info: info.status is not ActorStatus.READY or info.restarts > 0)
        answered_s = await since(cut_at, lambda info: info.status is ActorStatus.READY and info.restarts > 0)
        await trio.sleep(0.1)  # the news of names comes on its own
        assert await counter.add("after") == 1
        found.append((reported_s, answered_s))

    async def since(began: float, holds: Callable[[fray.ActorInfo], bool]) -> float:
        while not holds(await fray.current_cluster().actor_info("c")):  # noqa: ASYNC110
            await trio.sleep(0.1)
        return trio.current_time() - began

    run_on_machines(lose_it, rules)
    (result,) = found
    return result


@pytest.mark.parametrize("suspect_s", [30.0, 5.0])
def test_an_actor_that_may_overlap_answers_within_5_s_after_its_machine_is_suspect(suspect_s: float) -> None:
    reported_s, answered_s = back_after_s(SchedulerConfig(suspect_s=suspect_s), fray.ActorConfig(may_overlap=True))
    assert reported_s <= suspect_s + 0.2
    assert answered_s <= suspect_s + 5.0


def test_any_other_actor_is_placed_again_only_after_the_lease() -> None:
    reported_s, answered_s = back_after_s(SchedulerConfig(lease_s=300.0), fray.ActorConfig())
    assert reported_s <= 30.2
    assert 290.0 <= answered_s <= 305.0  # since the last word before the cut


# Actors of a machine that is silent for a while -----------------------------------------------------------------------


@contextmanager
def silent(sim: SimCluster, machine: str) -> Iterator[None]:
    """Cut a machine off from the controller and the driver while the block runs."""
    for other in (CONTROLLER, "driver"):
        sim.network.cut(machine, other)
    yield
    for other in (CONTROLLER, "driver"):
        sim.network.heal(machine, other)


def test_an_actor_of_a_silent_machine_is_restarting_and_its_monitor_continues() -> None:
    async def work(cluster: fray.Cluster, sim: SimCluster) -> None:
        group = await cluster.create_actor_group(Counter, count=1, name="c")
        await group.wait_ready()
        events = fray.monitor(group[0])
        assert isinstance(await anext(events), fray.Up)
        with silent(sim, (await cluster.actor_info(group[0])).node):
            down = await anext(events)
            assert isinstance(down, fray.Down)
            assert isinstance(down.error, fray.MachineLost)
            assert down.will_restart
            assert group.statuses() == [ActorStatus.RESTARTING]
            assert not group.is_done()
            late = fray.monitor(group[0])
        for watch in (events, late):
            up = await anext(watch)
            assert isinstance(up, fray.Up)
            assert up.incarnation == down.incarnation
        assert group.statuses() == [ActorStatus.READY]

    run_on_machines(work, SchedulerConfig())


def test_calls_continue_to_a_machine_that_only_the_controller_has_lost_until_its_lease_ends() -> None:
    async def work(cluster: fray.Cluster, sim: SimCluster) -> None:
        counter = await cluster.create_actor(Counter, name="c", max_restarts=1)
        assert await counter.add("before") == 1
        machine = (await cluster.actor_info(counter)).node
        sim.network.cut(machine, CONTROLLER)
        count, cut_at = 1, trio.current_time()
        with pytest.raises(fray.MachineLost):
            while True:
                assert await counter.add(f"during {count}") == count + 1
                count += 1
                await trio.sleep(5)
        # The node ends its attempts before its lease has expired, so that the next incarnation is never beside them.
        assert 150.0 < trio.current_time() - cut_at < 300.0
        assert await counter.add.options(idempotent=True)("after") == 1
        sim.network.heal(machine, CONTROLLER)

    run_on_machines(work, SchedulerConfig(lease_s=300.0))


def test_light_actors_of_a_machine_that_was_silent_are_followed_again() -> None:
    async def work(cluster: fray.Cluster, sim: SimCluster) -> None:
        async with cluster.open_scope("run") as scope:
            host = await scope.create_host("crowd")
            group = await host.create_actors(Counter, count=2, name="light")
            await group.wait_ready()
            events = fray.monitor(group[0])
            assert isinstance(await anext(events), fray.Up)
            async with trio.open_nursery() as nursery:
                with silent(sim, (await cluster.actor_info("crowd")).node):
                    assert (await anext(events)).will_restart
                    nursery.start_soon(group.shutdown)
                    await trio.sleep(60)
                with trio.fail_after(60):
                    assert isinstance(await anext(events), fray.Up)
                    down = await anext(events)
            assert not down.will_restart
            assert not isinstance(down.error, fray.MachineLost)
            assert group.statuses() == [ActorStatus.ENDED] * 2

    run_on_machines(work, SchedulerConfig())
