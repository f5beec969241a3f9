"""The page of `fray dashboard` in a real headless Chromium, beside a real controller and node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, ResourceConfig
from tests.processes.lab import TOKEN, Lab, open_lab, start_script
from tests.support.chromium import Tab, needs_chromium, open_tab
from tests.support.dashboards import run_fray, running_dashboard

pytestmark = needs_chromium

MARKUP = "<b onclick=alert(1)>bold</b>"
JOBS = 10_000
LAUNCH_MANY = f"""
import sys, fray, trio

async def main():
    async with fray.open_cluster({{spec!r}}) as cluster:
        far = fray.ResourceConfig.with_cpu(cpu=1000, memory="50MB")
        program = fray.Entrypoint.from_binary("true", [])
        await cluster.launch(fray.JobRequest(name="many", entrypoint=program, resources=far), count={JOBS})
        print("launched", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)

trio.run(main)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab:
        yield lab


def launched(lab: Lab, name: str, *command: str) -> str:
    return run_fray(lab, "run", "--detach", "--name", name, "--cpu", "0.1", "--memory", "50MB", "--", *command).strip()


def failed(lab: Lab, name: str, message: str) -> str:
    job = launched(lab, name, "sh", "-c", f"echo '{message}' >&2; exit 3")
    subprocess.run([sys.executable, "-m", "fray.cli", "wait", job], env=lab.environ(), check=False, timeout=60)
    return job


def log_in(lab: Lab, environ: dict[str, str], invitation: str) -> None:
    command = [sys.executable, "-m", "fray.cli", "login", lab.spec]
    ran = subprocess.run(
        command, env=environ, input=invitation, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


async def width_beyond(tab: Tab) -> int:
    """Return by how many pixels the page is wider than the window."""
    return int(await tab.evaluate("document.documentElement.scrollWidth - innerWidth"))


async def test_overview_has_capacity_failures_and_no_markup_of_users(lab: Lab) -> None:
    job = failed(lab, "broken", MARKUP)
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            assert "key=" not in await tab.evaluate("location.href")
            await tab.wait_for("document.querySelector('[data-kind=cpu]')")
            (node,) = json.loads(run_fray(lab, "nodes", "--json"))
            assert f"of {node['cpu_milli'] // 1000} used" in await tab.text("[data-kind=cpu]")
            await tab.wait_for("document.querySelector('[data-over-time=cpu] path.idle')")
            # Nothing runs; what was recorded is asked for in the same words by the command line.
            (cpu,) = json.loads(run_fray(lab, "capacity", "--kind", "cpu", "--json"))
            assert (cpu["total"], cpu["idle"]) == (node["cpu_milli"] / 1000, node["cpu_milli"] / 1000)
            assert f"idle {cpu['idle']:g}" in await tab.text("[data-over-time=cpu]")
            await tab.wait_for(f"document.querySelector('a[title={json.dumps(job)}]')")
            assert MARKUP in await tab.text("#view")
            assert await tab.evaluate("document.querySelectorAll('b').length") == 0
            assert tab.errors == []


async def test_amounts_of_zones_are_added_up_in_the_chart_of_the_capacity(lab: Lab) -> None:
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.wait_for("document.querySelector('[data-over-time=cpu]')")
            sums = """import("/page/capacity.js").then(({ sumsOf }) => {
                const rest = { kind: "gpu:h100", total: 8, reserved: 1, quarantined: 0, closed: 0 };
                const sample = (at, zone, used) => ({ ...rest, at, zone, used, idle: 7 - used });
                const samples = [sample(0, "a", 2), sample(0, "b", 3), sample(60, "a", 1)];
                const numbers = ([at, sum]) => [at, sum.total, sum.used, sum.reserved, sum.idle];
                const shown = (zone) => [...sumsOf(samples, zone).get("gpu:h100")].map(numbers);
                return JSON.stringify([shown("*"), shown("b")]);
            })"""
            assert json.loads(await tab.evaluate(sums)) == [[[0, 16, 5, 2, 9], [60, 8, 1, 1, 6]], [[0, 8, 3, 1, 4]]]


async def test_a_failed_job_has_its_cause_on_top(lab: Lab) -> None:
    job = failed(lab, "caused", "the disk is full")
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate(f"location.hash = '#/job/{job}'")
            await tab.wait_for("document.querySelector('#chain')?.innerText")
            headline, chain = await tab.text(".headline"), await tab.text("#chain")
            assert headline.split("\n")[:2] == ["ended with exit code 3; last lines of stderr:", "the disk is full"]
            assert chain == run_fray(lab, "explain", job).strip()
            top = "document.querySelector('{}').getBoundingClientRect().top"
            assert await tab.evaluate(f"{top.format('.headline')} < {top.format('#chain')}")
            assert "failure 3" in await tab.text("#view table")
            await tab.wait_for("document.querySelector('.log')?.innerText.includes('the disk is full')")
            assert tab.errors == []


async def test_a_log_appears_as_it_is_printed_and_is_searched(lab: Lab, tmp_path: Path) -> None:
    pipe = tmp_path / "next"
    script = f"echo first; while ! [ -e {pipe} ]; do sleep 0.05; done; echo second; sleep 600"
    job = launched(lab, "talking", "sh", "-c", script)
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate(f"location.hash = '#/job/{job}'")
            await tab.wait_for("document.querySelector('.log')?.innerText.trim() === 'first'")
            pipe.touch()
            await tab.wait_for("document.querySelector('.log').innerText.includes('second')")
            search = "document.querySelector('input[type=search]')"
            await tab.evaluate(f"{search}.value = 'sec'; {search}.dispatchEvent(new Event('input'))")
            await tab.wait_for("document.querySelector('.log').innerText.trim() === 'second'")
            await press_and_cancel(tab, "#stop", job)
            assert json.loads(run_fray(lab, "show", job, "--json"))["state"] == "running"
            await tab.click("#stop")
            await tab.click("dialog[open] button[value='yes']")
            await tab.wait_for("document.querySelector('h1').innerText.includes('stopped')")
            assert "`fray dashboard` by " in await tab.text(".headline")
            assert tab.errors == []


def outer() -> None:
    inner()


def inner() -> None:
    time.sleep(600)


async def press_and_cancel(tab: Tab, button: str, job: str) -> None:
    """Press a button, which asks once and names the job, and answer with "cancel", which changes nothing."""
    await tab.click(button)
    assert job in await tab.text("dialog[open]")
    await tab.click("dialog[open] button[value='']")
    await tab.wait_for("!document.querySelector('dialog[open]')")


async def test_a_flame_graph_shows_what_a_job_does(lab: Lab) -> None:
    need = ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
    async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
        job = await cluster.launch(JobRequest("burning", need, Entrypoint.from_callable(outer), detached=True))
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate(f"location.hash = '#/job/{job.info.job_id}'")
            await tab.click("#profile")
            frames = "[...document.querySelectorAll('svg.frame text')].map((text) => text.textContent)"
            await tab.wait_for(f"{frames}.includes('inner')")
            found = await tab.evaluate(frames)
            assert found.index("outer") == found.index("inner") - 1
            assert "of 25 captures" in await tab.text("#captures")
            await tab.evaluate("location.hash = '#/jobs'")  # which ends it
            assert tab.errors == []


async def test_requeue_asks_once_and_the_job_starts_again(lab: Lab) -> None:
    job = launched(lab, "moved", "sleep", "600")
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate(f"location.hash = '#/job/{job}'")
            await tab.wait_for("document.querySelector('h1')?.innerText.includes('running')")
            await press_and_cancel(tab, "#requeue", job)
            assert len(json.loads(run_fray(lab, "show", job, "--json"))["attempts"]) == 1
            await tab.click("#requeue")
            await tab.evaluate("document.querySelector('dialog[open] input').value = 'makes room'")
            await tab.click("dialog[open] button[value='yes']")
            # Its second attempt: what is shown is what the command line has.
            rows = "[...document.querySelectorAll('#view tr')].map((row) => row.innerText)"
            await tab.wait_for(f"({rows}).some((row) => row.startsWith('1.0') && row.includes('running'))")
            info = json.loads(run_fray(lab, "show", job, "--json"))
            assert (info["state"], len(info["attempts"]), info["retries"]) == ("running", 2, {"requeue": 1})
            said = run_fray(lab, "explain", job)
            assert ": makes room (by " in said
            assert await tab.text("#chain") == said.strip()
            assert tab.errors == []


async def test_a_reservation_that_is_gone_has_its_machines_and_its_end(lab: Lab) -> None:
    config = fray.ReservationConfig(ResourceConfig.with_cpu(cpu=0.1, memory="50MB"), name="held", detached=True)
    async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
        reserved = await cluster.create_reservation(config)
        await (await cluster.follow_reservation(reserved)).wait_held(60)
        await cluster.release_reservation(reserved, "no longer needed")
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate("location.hash = '#/reservations'")
            await tab.wait_for(f"document.querySelector('#gone')?.innerText.includes({json.dumps(reserved)})")
            (gone,) = json.loads(run_fray(lab, "reservations", "--all", "--all-namespaces", "--json"))["gone"]
            cells = "[...document.querySelectorAll('#gone tr:last-child > *')].map((cell) => cell.innerText)"
            row = await tab.evaluate(cells)
            assert [row[0], row[2], row[3], *row[7:]] == [
                *(gone["reservation_id"], "1 given of 1–1", "alpha", gone["ended_by"], gone["reason"])
            ]
            assert "no longer needed" in row[8]
            assert tab.errors == []


async def test_stop_and_requeue_need_the_role(lab: Lab, tmp_path: Path) -> None:
    job = launched(lab, "kept", "sleep", "600")
    invitation = run_fray(lab, "user", "add", "vera", "--role", "viewer")
    vera = {key: value for key, value in lab.environ().items() if key not in ("FRAY_TOKEN", "FRAY_CLUSTER_SPEC")}
    vera["XDG_CONFIG_HOME"] = str(tmp_path)
    log_in(lab, vera, invitation)
    with running_dashboard(lab, environ=vera) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate(f"location.hash = '#/job/{job}'")
            await tab.wait_for("document.querySelector('h1')?.innerText.includes('running')")
            assert "vera (viewer)" in await tab.text("#contact")
            assert await tab.evaluate("document.querySelector('#stop').disabled")
            assert await tab.evaluate("document.querySelector('#stop').title") == "role viewer may not stop jobs"
            assert await tab.evaluate("document.querySelector('#requeue').disabled")
            assert await tab.evaluate("document.querySelector('#requeue').title") == "role viewer may not requeue jobs"
            assert "users" not in await tab.text("nav")
            # The disabled buttons are a courtesy: the controller refuses the requests themselves.
            for action, request in (("stop", "Terminate"), ("requeue", "Requeue")):
                act = f"""fetch('/api/tables/status').then((each) => each.json()).then((found) => fetch(
                    '/api/jobs/{job}/{action}', {{method: 'POST', headers: {{'X-Fray-Token': found.rows[0][1].token}}}}
                )).then((each) => each.text())"""
                assert f"may not send {request}" in await tab.evaluate(act)
            info = json.loads(run_fray(lab, "show", job, "--json"))
            assert (info["state"], len(info["attempts"])) == ("running", 1)


async def test_ten_thousand_jobs_are_listed_sorted_filtered_and_scrolled(tmp_path: Path) -> None:
    # Of their own cluster, which ends with them: to end so many jobs one by one takes longer than the test.
    with open_lab(tmp_path) as lab, running_driver(LAUNCH_MANY.format(spec=lab.spec)), running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.evaluate("location.hash = '#/jobs?q=many&sort=name'")
            await tab.wait_for(f"document.querySelector('#counts')?.innerText.startsWith('{JOBS} of ')")
            assert 10 < await tab.evaluate("document.querySelectorAll('.row').length") < 100
            first = await tab.text(".row")
            await tab.evaluate("document.querySelector('.grid').scrollTop = 1e9")
            await tab.wait_for(f"document.querySelector('.row').innerText !== {json.dumps(first)}")
            assert 10 < await tab.evaluate("document.querySelectorAll('.row').length") < 100
            await tab.click("[data-sort=state]")
            assert await tab.evaluate("location.hash") == "#/jobs?q=many&sort=state"
            # The address alone has the choice: it is there after a reload.
            await tab.evaluate("window.isOld = true")
            await tab.call("Page.reload")
            await tab.wait_for(
                f"!window.isOld && document.querySelector('#counts')?.innerText.startsWith('{JOBS} of ')"
            )
            assert "↑" in await tab.text("[data-sort=state]")
            assert tab.errors == []


@contextmanager
def running_driver(script: str) -> Iterator[None]:
    """Run a driver that has printed a line, until it is killed."""
    driver = start_script(script)
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == b"launched\n"
        yield
    finally:
        driver.kill()
        driver.communicate()


async def test_a_phone_and_the_dark(lab: Lab) -> None:
    job = failed(lab, "small", "a line that is long " * 20)
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.resize(390, 844)
            await tab.prefer("dark")
            await tab.open(url)
            for address in (
                "#/",
                "#/jobs",
                f"#/job/{job}",
                "#/machines",
                "#/machine/alpha",
                "#/reservations",
                "#/audit",
            ):
                await tab.evaluate(f"location.hash = {json.dumps(address)}")
                await tab.wait_for("!document.querySelector('#view').innerText.includes('loading…')")
                assert await width_beyond(tab) <= 0, address
            background = "getComputedStyle(document.body).backgroundColor"
            dark = await tab.evaluate(background)
            await tab.prefer("light")
            await tab.wait_for(f"{background} !== {json.dumps(dark)}")
            assert (dark, await tab.evaluate(background)) == ("rgb(20, 23, 28)", "rgb(255, 255, 255)")
            await tab.click("#theme")
            assert await tab.evaluate(background) == dark
            assert tab.errors == []


async def test_a_cluster_that_restarts_is_said_and_reconnected(lab: Lab) -> None:
    with running_dashboard(lab) as url:
        async with open_tab() as tab:
            await tab.open(url)
            await tab.wait_for("document.querySelector('#contact').innerText.includes('fray://')")
            assert await tab.evaluate("document.querySelector('#notice').hidden")
            lab.kill("controller", signal.SIGKILL)
            await tab.wait_for("document.querySelector('#notice').innerText.includes('has not answered for')")
            lab.start_controller()
            await tab.wait_for("document.querySelector('#notice').hidden")
            job = await trio.to_thread.run_sync(launched, lab, "after", "true")
            await tab.evaluate("location.hash = '#/jobs'")
            await tab.wait_for(f"document.querySelector('a[title={json.dumps(job)}]')")
            assert tab.errors == []
