"""Cost of the dashboard with many jobs and machines, with pages in a real Chromium: ``python -m bench.dashboard``.

A controller and `fray dashboard` run as processes of their own, all nodes in a third one (`bench.fleet`). All jobs
wait, as they need more than any machine has. Then:

- **rest**: CPU time of controller and dashboard for a while, with no page and with one (the overview);
- **first**: time from an address to the first rows that are drawn, and to all of them, for jobs and for machines;
- **update**: time from the launch of a job, once accepted, to its row.

CPU time is that of the processes. Where other programs share the cores, the other times contain that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from statistics import median

import trio

import fray
from bench.fleet import ROOT, TOKEN, ControllerDaemon, SimulatedFleet
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.net.file_limits import raise_limit
from tests.support.chromium import Tab, open_tab
from tests.support.ports import free_port

FAR = ResourceConfig.with_cpu(cpu=1_000, memory="1GB")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def start_dashboard(port: int) -> tuple[subprocess.Popen[str], str]:
    """Start ``fray dashboard``; return it and its address."""
    environ = {**os.environ, "FRAY_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fray.cli", "dashboard", "--json", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--cluster", f"fray://127.0.0.1:{port}"], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]


def end(daemon: ControllerDaemon, dashboard: subprocess.Popen[str] | None) -> None:
    """End both."""
    if dashboard is not None:
        dashboard.send_signal(SIGKILL)
        dashboard.communicate()
    daemon.stop(SIGTERM)


async def measure(nodes: int, jobs: int, rest_s: float, directory: Path, say: Callable[[str], None]) -> None:
    """Run all of it."""
    port = free_port()
    daemon, fleet = ControllerDaemon(directory, port), SimulatedFleet(nodes, port, 1e6)
    dashboard = None
    try:
        async with trio.open_nursery() as nursery:
            daemon.start()
            await daemon.wait_listening()
            nursery.start_soon(fleet.run)
            await fleet.wait_joined(0)
            dashboard, url = await trio.to_thread.run_sync(start_dashboard, port)
            async with (
                fray.open_cluster(f"fray://127.0.0.1:{port}", token=TOKEN, logs=False) as cluster,
                open_tab() as tab,
            ):
                request = JobRequest("far", FAR, Entrypoint.from_binary("true", []), detached=True)
                for at in range(0, jobs, 1_000):
                    await cluster.launch(request, count=min(1_000, jobs - at), name=f"far-{at}/{{index}}")
                assert daemon.process is not None
                pids = {"controller": daemon.process.pid, "dashboard": dashboard.pid}
                say(f"rest, no page: {await rest(pids, rest_s)}")
                await tab.open(url)
                await tab.wait_for(f"document.body.innerText.includes('{jobs} pending')")
                await trio.sleep(5)
                say(f"rest, one page: {await rest(pids, rest_s)}")
                for view, count in (("jobs", jobs), ("machines", nodes)):
                    say(f"first, {view}: {await first(tab, url, view, count)}")
                await tab.open(url.partition("?")[0] + "#/jobs")
                took_s = [await update(cluster, tab, f"new-{number}") for number in range(10)]
                say(f"update: median {1e3 * median(took_s):.0f} ms, longest {1e3 * max(took_s):.0f} ms")
                nursery.cancel_scope.cancel()
    finally:
        end(daemon, dashboard)


async def rest(pids: dict[str, int], for_s: float) -> str:
    """Return the part of a core that each process takes."""
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await trio.sleep(for_s)
    return ", ".join(f"{name} {(cpu_s(pid) - before[name]) / for_s:.1%} of a core" for name, pid in pids.items())


async def first(tab: Tab, url: str, view: str, count: int) -> str:
    """Return how long it takes to show a view, from an empty tab."""
    await tab.open("about:blank")
    began = time.perf_counter()
    await tab.call("Page.navigate", url=f"{url.partition('?')[0]}#/{view}")
    await tab.wait_for("document.querySelectorAll('.row').length > 10")
    rows_s = time.perf_counter() - began
    await tab.wait_for(f"document.querySelector('#counts').innerText.startsWith('{count} of')")
    return f"rows after {1e3 * rows_s:.0f} ms, all {count:,} after {1e3 * (time.perf_counter() - began):.0f} ms"


async def update(cluster: fray.Cluster, tab: Tab, name: str) -> float:
    """Return how long after its launch a job has a row, in seconds."""
    job = await cluster.launch(JobRequest(name, FAR, Entrypoint.from_binary("true", []), detached=True))
    began = time.perf_counter()
    await tab.wait_for(f"document.querySelector('a[title={json.dumps(job.info.job_id)}]')")
    took_s = time.perf_counter() - began
    await trio.sleep(0.5)
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rest-s", type=float, default=20.0, help="length of the measurement at rest, in seconds")
    options = parser.parse_args()
    raise_limit()
    # Each launch warns that no machine fits.
    warnings.simplefilter("ignore")
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        trio.run(
            measure, options.nodes, options.jobs, options.rest_s, Path(directory), lambda text: print(text, flush=True)
        )


if __name__ == "__main__":
    main()
