"""Numbers of the page of `fray dashboard` in a real Chromium: those of the command line and of `fray sql`."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig
from tests.processes.lab import TOKEN, Lab
from tests.support.chromium import Tab, needs_chromium, open_tab
from tests.support.dashboards import run_fray, running_dashboard

pytestmark = needs_chromium

PRICES = "[prices]\ncpu = 3600.0\n"
ROWS = "[...document.querySelectorAll('.row')].map((row) => [...row.children].map((cell) => cell.innerText.trim()))"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster with prices, after a few seeded jobs, of which some failed, one waits, and one machine has left."""
    directory = tmp_path_factory.mktemp("lab")
    (directory / "policy.toml").write_text(PRICES)
    lab = Lab(directory)
    try:
        lab.start_controller("--policy", str(directory / "policy.toml"))
        for name in ("alpha", "beta"):
            lab.start_node(name)
        lab.wait_serving()
        trio.run(run_jobs, lab)
        lab.kill("beta", signal.SIGTERM)
        yield lab
    finally:
        lab.close()


async def run_jobs(lab: Lab) -> None:
    rng = random.Random(7)
    async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
        jobs = []
        for number in range(8):
            script = f"sleep {rng.uniform(0.1, 0.6):.2f}; exit {rng.choice([0, 0, 1])}"
            jobs.append(await cluster.launch(request(f"job-{number}", 0.5, "sh", "-c", script)))
        await cluster.wait(jobs)
        with pytest.warns(RuntimeWarning, match="fits no machine"):
            await cluster.launch(request("waiting", 1000, "true"))


def request(name: str, cpu: float, *command: str) -> JobRequest[object]:
    program = Entrypoint.from_binary(command[0], list(command[1:]))
    return JobRequest(name, ResourceConfig.with_cpu(cpu=cpu, memory="50MB"), program, detached=True)


def asked(lab: Lab, *words: str) -> Any:
    return json.loads(run_fray(lab, *words, "--json"))


async def show(tab: Tab, address: str, until: str) -> Any:
    """Go to an address within the page and return the rows of its table once ``until`` is true."""
    await tab.evaluate(f"location.hash = {json.dumps(address)}")
    await tab.wait_for(until)
    return await tab.evaluate(ROWS)


async def test_the_numbers_of_the_page_are_those_of_the_command_line_and_of_sql(lab: Lab) -> None:
    def in_sql(query: str) -> Any:
        return asked(lab, "sql", query)

    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.wait_for("document.querySelector('#view').innerText.includes('1 ready')")
            overview = await tab.text("#view")
            states = in_sql("select state, count(*) as jobs from jobs group by state")
            assert {row["state"] for row in states} == {"succeeded", "failed", "pending"}
            for row in states:
                assert f"{row['jobs']} {row['state']}" in overview
            (node,) = asked(lab, "nodes")
            assert f"0 of {node['cpu_milli'] // 1000} used" in await tab.text("[data-kind=cpu]")

            costs = {each["key"]: each["total"] for each in asked(lab, "cost", "--by", "job")}
            held = "[...document.querySelectorAll('.row')].some((row) => row.innerText.match(/\\d\\.\\d\\d/))"
            rows = await show(tab, "#/jobs?sort=name&flat=1", held)
            shown = {row[0]: row[await index_of(tab, "held")] for row in rows}
            names = {row["name"]: row["job_id"] for row in in_sql("select name, job_id from jobs")}
            assert shown == {name: f"{costs[job]:,.2f}" if job in costs else "" for name, job in names.items()}

            for by in ("job", "node", "cause"):
                sums = asked(lab, "history", "--by", by)
                done = f"location.hash.includes('{by}') && document.querySelectorAll('.row').length === {len(sums)}"
                await tab.evaluate("location.hash = '#/overview'")
                await tab.wait_for("document.querySelector('#capacity')")
                rows = await show(tab, f"#/history?by={by}", done)
                hours = await index_of(tab, "cpu")
                attempts = await index_of(tab, "attempts")
                found = {row[0]: (float(row[hours]), int(row[attempts])) for row in rows}
                assert found.keys() == {each["name"] or each["key"] for each in sums}
                for each in sums:
                    cpu_hours, count = found[each["name"] or each["key"]]
                    assert cpu_hours == pytest.approx(each["held"]["cpu"], rel=0.05)  # two digits are shown
                    assert count == each["attempts"]
            (total,) = in_sql("select sum(cpu_hours) as cpu from attempts")
            in_all = f"in all {3600 * total['cpu']:,.2f}"
            assert await tab.text("#total") == f"{in_all}; without a price in the policy: memory"
            assert tab.errors == []


async def columns_of(tab: Tab) -> list[str]:
    """Return the names of the columns of the table that is shown."""
    names = "[...document.querySelectorAll('.head button')].map((button) => button.dataset.sort)"
    return list(await tab.evaluate(names))


async def index_of(tab: Tab, column: str) -> int:
    return (await columns_of(tab)).index(column)


async def test_a_machine_that_left_has_its_end_what_ran_there_and_its_events(lab: Lab) -> None:
    gone = asked(lab, "nodes", "--all")["gone"]
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            rows = await show(tab, "#/machines?state=gone", "document.querySelector('.row')")
            assert [(row[0], row[1]) for row in rows] == [("beta", "gone")]
            assert gone[0]["reason"] in rows[0][-1]
            await show(tab, "#/machine/beta", "document.querySelector('#view').innerText.includes('was there')")
            text = await tab.text("#view")
            assert "The cluster has no machine of this name now." in text
            assert gone[0]["reason"] in text
            ran = asked(lab, "sql", "select name, cause from attempts where node = 'beta'")
            for row in ran:
                assert row["name"] in text
            assert len(ran) == await tab.evaluate("document.querySelectorAll('#ran tr').length - 1")
            noted = asked(lab, "events", "--node", "beta")
            assert len(noted) == await tab.evaluate("document.querySelectorAll('#events tr').length")
            assert noted[-1]["text"] in text
            assert tab.errors == []


async def test_an_actor_has_its_calls_its_queue_and_its_callers(lab: Lab) -> None:
    with running_dashboard(lab) as url:
        async with (
            fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster,
            trio.open_nursery() as nursery,
            open_tab() as tab,
        ):
            slow = ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
            counter = await cluster.create_actor(Counter, name="counter", resources=slow)
            caller = await cluster.create_actor(Relay, counter, name="relay", resources=slow)
            for _ in range(5):
                await caller.add(2)
            with pytest.raises(ValueError, match="on request"):
                await counter.fail()
            # One runs until the test ends, and two wait for it.
            for _ in range(3):
                nursery.start_soon(ignore_end, counter.wait)
            await tab.open(url)
            await tab.evaluate("location.hash = '#/actors?sort=name'")
            await tab.wait_for(f"({ROWS}).some((row) => row[0] === 'counter' && row[3] === '2')")
            row = dict(zip(await columns_of(tab), (await tab.evaluate(ROWS))[0], strict=True))
            assert {name: row[name] for name in ("name", "status", "running", "queued", "calls", "errors")} == {
                "name": "counter",
                "status": "ready",
                "running": "1",
                "queued": "2",
                "calls": "6",
                "errors": "1",
            }
            assert "relay" in await tab.text("#edges")
            info = await cluster.actor_info("counter")
            assert info.calls is not None
            assert (info.calls.running, info.calls.queued, sum(info.calls.latency_buckets)) == (1, 2, 6)
            relay = await cluster.actor_info("relay")
            calls = {each.incarnation: (each.calls, each.running) for each in info.callers}
            assert calls.pop(relay.incarnation) == (5, 0)
            assert list(calls.values()) == [(4, 3)]  # this driver

            shown = await trio.to_thread.run_sync(asked, lab, "show", info.actor_id)
            assert shown["attempts"][0]["calls"]["actors"][0]["metrics"]["queued"] == 2
            text = await trio.to_thread.run_sync(run_fray, lab, "show", info.actor_id)
            assert "counter: 1 running, 2 queued, 6 ended, 1 with errors" in text
            assert f"{relay.incarnation} (0 of 5 calls under way)" in text
            await tab.evaluate(f"location.hash = '#/job/{info.actor_id}'")
            await tab.wait_for("document.querySelector('#calls .callers')")
            assert "counter: 1 running, 2 queued, 6 ended, of them 1 with errors" in await tab.text("#calls")
            assert relay.incarnation in await tab.text("#calls .callers")
            assert tab.errors == []
            query = f"select * from actors where actor_id = '{info.actor_id}'"
            (living,) = await trio.to_thread.run_sync(asked, lab, "sql", query)
            expected = {"name": "counter", "calls": 6, "errors": 1, "cancelled": 0, "running": 1, "queued": 2}
            assert {name: living[name] for name in expected} == expected
            assert (living["job_id"], living["status"], living["ended_at"]) == (info.actor_id, "ready", None)
            assert living["latency_p99_s"] == info.calls.latency_s(0.99)
            nursery.cancel_scope.cancel()
    # Its driver has left, and so it ends; what it last reported stays.
    with trio.fail_after(60):
        while not (ended := (await trio.to_thread.run_sync(asked, lab, "sql", query))[0])["ended_at"]:  # noqa: ASYNC110
            await trio.sleep(0.1)
    assert (ended["status"], ended["running"], ended["queued"]) == ("ended", 0, 0)
    assert (ended["calls"] >= 6, ended["errors"]) == (True, 1)


async def ignore_end(call: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(fray.FrayError):
        await call()


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, more: int) -> int:
        self.count += more
        return self.count

    def fail(self) -> None:
        raise ValueError("on request")

    def wait(self) -> None:
        time.sleep(600)


class Relay:
    def __init__(self, counter: fray.ActorHandle) -> None:
        self.counter = counter

    async def add(self, more: int) -> int:
        return await self.counter.add(more)  # type: ignore[no-any-return]
