"""Cost of the dashboard with many jobs and machines, with pages in a real Chromium: ``python -m bench.dashboard``.

A controller and `fray dashboard` run as processes of their own, all nodes in a third one (`bench.fleet`). All jobs
wait, as they need more than any machine has. Then:

- **rest**: CPU time of controller and dashboard for a while: with no page, with one (the overview), and with that and
  `fray metrics`, which is scraped every 15 s;
- **first**: time from an address to the first rows that are drawn, and to all of them, for jobs and for machines;
- **update**: time from the launch of a job, once accepted, to its row, and until which moment of it which leg lasts:
  until `fray dashboard` has sent the row, until the page's script has it, and until it is drawn; and from the cordon of
  a machine, once accepted, until its row says so.
- **steps**: CPU time of each step of the controller's loop, and of each pass of its event loop, while short jobs are
  launched at a steady rate: without a page, and with ten streams that read what ten pages do (five overviews, five
  lists of jobs), in turn.

CPU time is that of the processes. Where other programs share the cores, the other times contain that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from signal import SIGKILL, SIGTERM
from statistics import median
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trio

import fray
from bench.fleet import ROOT, TOKEN, ControllerDaemon, SimulatedFleet
from bench.timed_controller import FILE, PASS, STEP, read_steps
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.net.file_limits import raise_limit
from tests.support.chromium import Tab, open_tab
from tests.support.ports import free_port

# Run before the page's own scripts: notes when the first event with a job has come, and when its row is there.
NOTE_TIMES = """
window.cameAt = {}; window.drawnAt = {};
const clock = () => (performance.timeOrigin + performance.now()) / 1000;
window.EventSource = class extends EventSource {
  constructor(url) {
    super(url);
    this.addEventListener("message", (event) => {
      const at = clock();
      for (const [, id] of event.data.slice(0, 100000).matchAll(/\\["(new-[^"]+)"/g)) window.cameAt[id] ??= at;
    });
  }
};
new MutationObserver(() => {
  for (const link of document.querySelectorAll("a[title^=new-]")) window.drawnAt[link.title] ??= clock();
  for (const state of document.querySelectorAll(".row span.cordoned")) {
    window.drawnAt[state.closest(".row").querySelector("a").innerText] ??= clock();
  }
}).observe(document, { childList: true, subtree: true });
"""
FAR = ResourceConfig.with_cpu(cpu=1_000, memory="1GB")
SHORT = ResourceConfig.with_cpu(cpu=1, memory="1GB")
AT_ONCE, PER_S = 10, 10
"""Jobs of a launch, and launches a second, while steps are measured."""
RUNS_S = 1.0
"""Run time of such a job in seconds."""
SCRAPE_S = 15.0
"""Seconds between two scrapes, as by Prometheus with its usual configuration."""
SETTLE_S = 5.0
OVERVIEW, LIST = "jobs,nodes,usage,queue,reservations,samples", "jobs,held,progress"
"""Tables of two views of the page."""
PAGES = (OVERVIEW, LIST) * 5
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def start(port: int, *command: str) -> subprocess.Popen[str]:
    """Start a command of ``fray``."""
    environ = {**os.environ, "FRAY_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    whole = [sys.executable, "-m", "fray.cli", *command, "--cluster", f"fray://127.0.0.1:{port}"]
    return subprocess.Popen(whole, env=environ, stdout=subprocess.PIPE, text=True)


def start_dashboard(port: int) -> tuple[subprocess.Popen[str], str]:
    """Start ``fray dashboard``; return it and its address."""
    process = start(port, "dashboard", "--json", "--listen", "127.0.0.1:0")
    assert process.stdout is not None
    return process, json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]


def end(daemon: ControllerDaemon, dashboard: subprocess.Popen[str] | None) -> None:
    """End both."""
    if dashboard is not None:
        dashboard.send_signal(SIGKILL)
        dashboard.communicate()
    daemon.stop(SIGTERM)


async def measure(options: argparse.Namespace, directory: Path, say: Callable[[str], None]) -> None:
    """Run all of it."""
    port = free_port()
    environ = {FILE: str(directory / "steps")}
    daemon = ControllerDaemon(directory, port, module="bench.timed_controller", environ=environ)
    fleet = SimulatedFleet(options.nodes, port, RUNS_S)
    dashboard, spans = None, {}
    try:
        async with trio.open_nursery() as nursery:
            daemon.start()
            await daemon.wait_listening()
            nursery.start_soon(fleet.run)
            await fleet.wait_joined(0)
            dashboard, url = await trio.to_thread.run_sync(start_dashboard, port)
            async with fray.open_cluster(f"fray://127.0.0.1:{port}", token=TOKEN, logs=False) as cluster:
                request = JobRequest("far", FAR, Entrypoint.from_binary("true", []), detached=True)
                for at in range(0, options.jobs, 1_000):
                    count = min(1_000, options.jobs - at)
                    await cluster.launch(request, count=count, name=f"far-{at}/{{index}}")
                assert daemon.process is not None
                # What other programs take of the cores changes how many events a step finds; less so with priority.
                with suppress(PermissionError):
                    os.setpriority(os.PRIO_PROCESS, daemon.process.pid, -10)
                pids = {"controller": daemon.process.pid, "dashboard": dashboard.pid}
                if "page" in options.only:
                    say(f"rest, no page: {await rest(pids, options.rest_s)}")
                    async with open_tab() as tab:
                        await measure_page(cluster, port, tab, url, pids, options, say)
                if "steps" in options.only:
                    spans = await steps(cluster, url, options.steps_s, options.rounds)
                nursery.cancel_scope.cancel()
    finally:
        end(daemon, dashboard)
    for line in describe_steps(directory / "steps", spans):
        say(line)


async def measure_page(
    cluster: fray.Cluster,
    port: int,
    tab: Tab,
    url: str,
    pids: dict[str, int],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    """Measure what needs a browser."""
    jobs, nodes, updates = options.jobs, options.nodes, options.updates
    await tab.open(url)
    await tab.wait_for(f"document.body.innerText.includes('{jobs} pending')")
    await trio.sleep(SETTLE_S)
    say(f"rest, one page: {await rest(pids, options.rest_s)}")
    say(f"rest, one page and metrics: {await rest_with_metrics(port, pids, options.rest_s)}")
    for view, count in (("jobs", jobs), ("machines", nodes)):
        say(f"first, {view}: {await first(tab, url, view, count)}")
    await tab.call("Page.addScriptToEvaluateOnNewDocument", source=NOTE_TIMES)
    await tab.open("about:blank")
    await tab.open(url.partition("?")[0] + "#/jobs")
    await tab.wait_for(f"document.querySelector('#counts')?.innerText.startsWith('{jobs} of')")
    sent: dict[str, float] = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(note_rows, url, sent)
        await trio.sleep(3)
        took_s = [await update(cluster, tab, sent, f"new-{number}") for number in range(updates)]
        nursery.cancel_scope.cancel()
    for leg, values in zip(("sent", "received", "drawn"), zip(*took_s, strict=True), strict=True):
        say(f"update, {leg}: median {1e3 * median(values):.0f} ms, longest {1e3 * max(values):.0f} ms")
    await tab.evaluate("location.hash = '#/machines'")
    await tab.wait_for(f"document.querySelector('#counts')?.innerText.startsWith('{nodes} of')")
    names = await tab.evaluate("[...document.querySelectorAll('.row a')].map((link) => link.innerText)")
    took = [await cordon(cluster, tab, name) for name in names[:updates]]
    say(f"update of a machine, drawn: median {1e3 * median(took):.0f} ms, longest {1e3 * max(took):.0f} ms")


async def steps(cluster: fray.Cluster, url: str, for_s: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Launch jobs without a page and with `PAGES`, in turn; return the times of each, from when to when."""
    found: dict[str, list[tuple[float, float]]] = {"no page": [], "ten pages": []}
    for _ in range(rounds):
        for name, spans in found.items():
            async with trio.open_nursery() as nursery:
                for tables in PAGES if name != "no page" else ():
                    await nursery.start(read_page, url, tables)
                # Until the pages have all rows.
                await trio.sleep(SETTLE_S)
                begin = time.time()
                await launch_steadily(cluster, for_s)
                spans.append((begin, time.time()))
                nursery.cancel_scope.cancel()
    return found


async def launch_steadily(cluster: fray.Cluster, for_s: float) -> None:
    """Launch `AT_ONCE` jobs `PER_S` times a second."""
    request = JobRequest("short", SHORT, Entrypoint.from_binary("true", []), detached=True)
    began = trio.current_time()
    for number in range(round(for_s * PER_S)):
        await trio.sleep_until(began + number / PER_S)
        await cluster.launch(request, count=AT_ONCE, name=f"short-{time.time_ns()}/{{index}}")


def describe_steps(file: Path, spans: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    """Yield a line for each kind of time and each number of pages."""
    for kind, what in ((STEP, "step"), (PASS, "pass of the event loop")):
        for name, times in spans.items():
            rounds = [sorted(read_steps(file, kind, *each)) for each in times]
            p99 = [1e3 * each[int(0.99 * len(each))] for each in rounds]
            whole = sorted(chain.from_iterable(rounds))
            numbers = {part: 1e3 * whole[int(part * len(whole))] for part in (0.5, 0.9, 0.99)}
            text = ", ".join(f"p{100 * part:g} {value:.2f} ms" for part, value in numbers.items())
            per_round = " ".join(f"{value:.2f}" for value in p99)
            yield f"{what}, {name}: {len(whole)}, {sum(whole):.2f} s, {text} (p99 of each round: {per_round})"


async def rest(pids: dict[str, int], for_s: float) -> str:
    """Return the part of a core that each process takes."""
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await trio.sleep(for_s)
    return ", ".join(f"{name} {(cpu_s(pid) - before[name]) / for_s:.1%} of a core" for name, pid in pids.items())


async def rest_with_metrics(port: int, pids: dict[str, int], for_s: float) -> str:
    """Return what `rest` returns while ``fray metrics`` runs, too, and is scraped."""
    at = free_port()
    exporter = start(port, "metrics", "--listen", f"127.0.0.1:{at}")
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(scrape, f"http://127.0.0.1:{at}/metrics")
            found = await rest({**pids, "metrics": exporter.pid}, for_s)
            nursery.cancel_scope.cancel()
        return found
    finally:
        exporter.send_signal(SIGKILL)
        exporter.communicate()


async def scrape(url: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Get the numbers every `SCRAPE_S` seconds."""
    is_started = False
    while True:
        try:
            with await trio.to_thread.run_sync(urllib.request.urlopen, url) as answer:
                await trio.to_thread.run_sync(answer.read)
        except urllib.error.URLError:
            if is_started:
                raise
            await trio.sleep(0.2)  # it does not listen yet
            continue
        if not is_started:
            is_started = True
            task_status.started()
        await trio.sleep(SCRAPE_S)


async def first(tab: Tab, url: str, view: str, count: int) -> str:
    """Return how long it takes to show a view, from an empty tab."""
    await tab.open("about:blank")
    began = time.perf_counter()
    await tab.call("Page.navigate", url=f"{url.partition('?')[0]}#/{view}")
    await tab.wait_for("document.querySelectorAll('.row').length > 10")
    rows_s = time.perf_counter() - began
    await tab.wait_for(f"document.querySelector('#counts').innerText.startsWith('{count} of')")
    return f"rows after {1e3 * rows_s:.0f} ms, all {count:,} after {1e3 * (time.perf_counter() - began):.0f} ms"


async def update(cluster: fray.Cluster, tab: Tab, sent: dict[str, float], name: str) -> list[float]:
    """Return how long after its launch the row of a job is sent, received and drawn, in seconds."""
    job = await cluster.launch(JobRequest(name, FAR, Entrypoint.from_binary("true", []), detached=True))
    began, found = time.time(), json.dumps(job.info.job_id)
    await tab.wait_for(f"window.drawnAt[{found}]")
    came, drawn = await tab.evaluate(f"[window.cameAt[{found}], window.drawnAt[{found}]]")
    # Not a multiple of any period.
    await trio.sleep(random.uniform(0.5, 1.0))
    return [sent[job.info.job_id] - began, came - began, drawn - began]


async def cordon(cluster: fray.Cluster, tab: Tab, name: str) -> float:
    """Return how long after its cordon the row of a machine says so, in seconds."""
    await cluster.cordon(name)
    began, found = time.time(), json.dumps(name)
    await tab.wait_for(f"window.drawnAt[{found}]")
    await trio.sleep(random.uniform(0.5, 1.0))
    return float(await tab.evaluate(f"window.drawnAt[{found}]")) - began


async def read_page(url: str, tables: str, *, task_status: trio.TaskStatus[None]) -> None:
    """Read the stream of a page with these tables until cancelled."""
    async with open_stream(url, tables) as stream:
        task_status.started()
        while await stream.receive_some(1 << 16):
            pass


async def note_rows(url: str, sent: dict[str, float], *, task_status: trio.TaskStatus[None]) -> None:
    """Read the stream of jobs; note when a new one comes first, until cancelled."""
    async with open_stream(url, "jobs") as stream:
        task_status.started()
        async for message in _messages(stream):
            at = time.time()
            for row in message.get("rows", ()) if message.get("table") == "jobs" else ():
                sent.setdefault(row[0], at)


@asynccontextmanager
async def open_stream(url: str, tables: str) -> AsyncIterator[trio.SocketStream]:
    """Open the stream of events that a page with these tables reads."""
    parts = urlsplit(url)
    key = parse_qs(parts.query)["key"][0]
    assert parts.hostname is not None
    assert parts.port is not None
    stream = await trio.open_tcp_stream(parts.hostname, parts.port)
    async with stream:
        lines = (f"GET /api/live?tables={tables} HTTP/1.1", f"Host: {parts.netloc}", f"Authorization: Bearer {key}")
        await stream.send_all("\r\n".join([*lines, "", ""]).encode())
        yield stream


async def _messages(stream: trio.SocketStream) -> AsyncIterator[Any]:
    waiting = b""
    while part := await stream.receive_some(1 << 16):
        # Chunks are removed by their marks: no event contains a line feed.
        *events, waiting = (waiting + part).split(b"\n\n")
        for event in events:
            if (begin := event.find(b"data: ")) >= 0:
                yield json.loads(event[begin + 6 :])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rest-s", type=float, default=20.0, help="length of the measurement at rest, in seconds")
    parser.add_argument("--steps-s", type=float, default=20.0, help="length of each measurement of steps, in seconds")
    parser.add_argument("--rounds", type=int, default=4, help="such measurements without a page, and with ten")
    parser.add_argument("--only", default="page,steps", help="what is measured (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=10, help="jobs launched to measure updates")
    options = parser.parse_args()
    raise_limit()
    # Each launch warns that no machine fits.
    warnings.simplefilter("ignore")
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        trio.run(measure, options, Path(directory), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
