"""Numbers of the page after a seeded day of jobs, which a simulated cluster has run: they are those of the API, of
`fray sql`, and of what the simulated machines have recorded themselves."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing
from attrs import frozen

import fray
from fray import Cluster, Entrypoint, JobRequest, ResourceConfig
from fray.controller.store import Store
from fray.model.resources import Capacity
from fray.scheduler.state.rows import SchedulerConfig
from fray.testing import sim_cluster
from fray.testing.fakes import SimNetwork
from fray.testing.ground_truth import GroundTruth, ProcessRun
from fray.testing.seed import Seed, Trace, steady
from fray.testing.sim_cluster import DriverProcess, MachineSpec, SimCluster, open_sim_cluster
from tests.monitoring.test_dashboard_numbers import PRICES, asked, index_of, show
from tests.processes.lab import TOKEN, Lab
from tests.simulation import workloads
from tests.support.chromium import needs_chromium, open_tab
from tests.support.dashboards import running_dashboard

pytestmark = needs_chromium

DAY_S, HOUR_S, GB = 86_400.0, 3_600.0, 2**30
JOBS = 12
"""Jobs of each user."""
USERS = ("ada", "bob", "eve")
MACHINES = {"m1": 8, "m2": 4, "m3": 4}
"""CPUs of each."""


@frozen
class Day:
    """A day of the past, and the cluster that has its store."""

    lab: Lab
    processes: list[ProcessRun]
    """Processes as the simulated machines have recorded them."""
    failing: set[str]
    """Names of jobs whose code fails."""


async def work(seed: Seed, user: str, failing: set[str], cluster: Cluster) -> None:
    """Launch the jobs of one user over the first hours of the day, and wait until all have ended."""
    rng, jobs = seed.stream(user), []
    for number in range(JOBS):
        await trio.sleep(rng.uniform(60, HOUR_S))
        name, lasts_s = f"{user}-{number}", rng.uniform(300, 2 * HOUR_S)
        # By their own numbers, so that each seed has both.
        entrypoint: Entrypoint[Any] = Entrypoint.from_callable(workloads.give, args=(name, number, lasts_s))
        if number % 5 == 4:
            failing.add(name)
            entrypoint = Entrypoint.from_callable(workloads.fail, args=(name, lasts_s))
        need = ResourceConfig.with_cpu(cpu=rng.choice([0.5, 1, 3]), memory="1GB")
        jobs.append(await cluster.launch(JobRequest(name, need, entrypoint, detached=True)))
    await cluster.wait(jobs)


def run_day(store: Path, seed: Seed) -> tuple[list[ProcessRun], set[str]]:
    """Run a day of a simulated cluster that ends now; return its processes, and the names of jobs that fail."""
    truth, failing = GroundTruth(trio.current_time), set[str]()

    async def main() -> None:
        machines = [MachineSpec(name, Capacity(1000 * cpus, 64 * GB, GB)) for name, cpus in MACHINES.items()]
        network = SimNetwork(seed.stream("network"), Trace())
        open_store = partial(Store, store)
        async with open_sim_cluster(
            seed, network, truth, machines, rules=SchedulerConfig(), open_store=open_store, run_in_thread=inline
        ) as sim:
            await trio.sleep(2)
            async with trio.open_nursery() as nursery:
                for user in USERS:
                    driver = DriverProcess(sim, f"{user}.driver")
                    body = partial(work, seed, user, failing)
                    nursery.start_soon(partial(driver.run, body, namespace="day", grace_s=30.0))
                nursery.start_soon(lose_machine, sim)
            assert trio.current_time() < DAY_S
            await trio.sleep_until(DAY_S)

    with (
        workloads.book(truth),
        steady(seed),
        mock.patch.object(sim_cluster, "EPOCH_S", time.time() - DAY_S),
    ):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return list(truth.processes.values()), failing


async def inline(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a function that would have had a thread: the virtual clock does not wait for threads."""
    return function(*args)


async def lose_machine(sim: SimCluster) -> None:
    """Lose a machine in the middle of the work: what runs there starts again elsewhere."""
    await trio.sleep(4 * HOUR_S)
    sim.remove_machine("m3")


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """A day of a simulated cluster, whose store a real controller has taken over."""
    directory = tmp_path_factory.mktemp("lab")
    (directory / "policy.toml").write_text(PRICES)
    processes, failing = run_day(directory / "store", Seed(1))
    lab = Lab(directory)
    try:
        lab.start_controller("--policy", str(directory / "policy.toml"))
        lab.wait_serving()
        yield Day(lab, processes, failing)
    finally:
        lab.close()


def true_hours(day: Day, key: Callable[[ProcessRun], str]) -> dict[str, float]:
    """Return the CPU-hours of the processes by a key of each."""
    found: dict[str, float] = defaultdict(float)
    for run in day.processes:
        assert run.ended is not None
        found[key(run)] += run.spec.demand.cpu_milli / 1000 * (run.ended - run.began) / HOUR_S
    return found


def name_of(run: ProcessRun) -> str:
    return run.spec.name


def user_of(run: ProcessRun) -> str:
    return run.spec.name.partition("-")[0]


def close_to(expected: dict[str, float]) -> Any:
    # A process begins a moment after it was placed, and a lost machine is known to be lost later than it was.
    return pytest.approx(expected, rel=0.02, abs=0.05)


async def test_states_and_costs_of_jobs_are_those_of_the_machines_of_the_day(day: Day) -> None:
    states = {
        name: "failed" if name in day.failing else "succeeded" for name in {name_of(run) for run in day.processes}
    }
    assert len(states) == JOBS * len(USERS)
    recorded = {row["name"]: row for row in asked(day.lab, "sql", "select * from jobs")}
    assert {name: row["state"] for name, row in recorded.items()} == states
    attempts = Counter(name_of(run) for run in day.processes)
    assert {name: row["attempts"] for name, row in recorded.items()} == attempts
    assert max(attempts.values()) == 2, "the loss of a machine has hit none"
    async with fray.open_cluster(day.lab.spec, token=TOKEN, logs=False) as cluster:
        listed = {info.name: info.state.value for info in await cluster.list_jobs("*")}
    assert listed == states
    costs = {each["name"]: each["total"] for each in asked(day.lab, "cost", "--by", "job")}
    assert costs == close_to({name: 3600 * hours for name, hours in true_hours(day, name_of).items()})
    with running_dashboard(day.lab) as url:
        async with open_tab() as tab:
            await tab.resize(1280, 1800)
            await tab.open(url)
            await tab.wait_for("document.querySelector('#view').innerText.includes(' failed')")
            overview = await tab.text("#view")
            for state, count in Counter(states.values()).items():
                assert f"{count} {state}" in overview
            priced = "[...document.querySelectorAll('.row')].filter((row) => /\\d\\.\\d\\d/.test(row.innerText)).length"
            rows = await show(tab, "#/jobs?sort=name&flat=1", f"{priced} === {len(states)}")
            columns = [await index_of(tab, name) for name in ("name", "state", "user", "held")]
            assert {tuple(row[index] for index in columns) for row in rows} == {
                (name, state, name.partition("-")[0], f"{costs[name]:,.2f}") for name, state in states.items()
            }
            assert tab.errors == []


async def test_hours_of_users_and_machines_are_those_of_the_machines_of_the_day(day: Day) -> None:
    by_user, by_node = true_hours(day, user_of), true_hours(day, lambda run: run.machine)
    jobs = dict.fromkeys(USERS, JOBS)
    users = {row["user"]: row for row in asked(day.lab, "sql", "select * from users")}
    assert {user: users[user]["jobs"] for user in USERS} == jobs
    assert {user: users[user]["cpu_hours"] for user in USERS} == close_to(by_user)
    query = "select node, sum(cpu_hours) as cpu from attempts group by node"
    nodes = {row["node"]: row["cpu"] for row in asked(day.lab, "sql", query)}
    assert nodes == close_to(by_node)
    async with fray.open_cluster(day.lab.spec, token=TOKEN, logs=False) as cluster:
        assert {each.key: each.held.cpu for each in await cluster.history("user")} == close_to(by_user)
        assert {each.key: each.held.cpu for each in await cluster.history("node")} == close_to(by_node)
        known = {node.name: node.cpu_milli / 1000 for node in await cluster.nodes()}
    assert known == MACHINES
    with running_dashboard(day.lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            for by, expected in (("user", by_user), ("node", by_node)):
                costs = {each["key"]: each["total"] for each in asked(day.lab, "cost", "--by", by)}
                assert costs == close_to({key: 3600 * hours for key, hours in expected.items()})
                await tab.evaluate("location.hash = '#/overview'")
                await tab.wait_for("document.querySelector('#capacity')")
                there = (
                    f"location.hash.includes('{by}') && document.querySelectorAll('.row').length === {len(expected)}"
                )
                rows = await show(tab, f"#/history?by={by}", there)
                cpu, cost, count = [await index_of(tab, name) for name in ("cpu", "cost", "attempts")]
                assert {row[0]: row[cost] for row in rows} == {key: f"{each:,.2f}" for key, each in costs.items()}
                assert {row[0]: float(row[cpu]) for row in rows} == pytest.approx(expected, rel=0.05)  # two digits
                assert sum(int(row[count]) for row in rows) == len(day.processes)
            # After the day its machines are on record, and none of them answers.
            silent = "[...document.querySelectorAll('.row .silent')].length"
            rows = await show(tab, "#/machines?sort=name", f"{silent} === {len(MACHINES)}")
            columns = [await index_of(tab, name) for name in ("name", "state", "cpu", "attempts")]
            assert [[row[index] for index in columns] for row in rows] == [
                [name, "silent", f"0 of {cpus}", "0"] for name, cpus in MACHINES.items()
            ]
            listed = {row["node"]: row["state"] for row in asked(day.lab, "sql", "select node, state from nodes")}
            assert listed == dict.fromkeys(MACHINES, "silent")
            await tab.evaluate("location.hash = '#/overview'")
            await tab.wait_for(f"document.querySelector('#view').innerText.includes('{len(MACHINES)} silent')")
            used = f"0 of {sum(MACHINES.values())} used"
            await tab.wait_for(f"document.querySelector('[data-kind=cpu]')?.innerText.includes('{used}')")
            assert tab.errors == []
