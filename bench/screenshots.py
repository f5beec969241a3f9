"""Screenshots of the dashboard for the documentation: ``python -m bench.screenshots``.

A controller and `fray dashboard` run as processes of their own, beside 24 simulated machines in two zones, on which
seeded jobs run, end and fail for one and a half minutes. A headless Chromium shows three views, written to
``docs/images/``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from pathlib import Path

import trio

import fray
from bench.dashboard import end, start_dashboard
from bench.fleet import GB, ROOT, TOKEN, ControllerDaemon, TimerLauncher
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.model.resources import Capacity, Device
from fray.model.specs import EndReason, ObservedAttempt, Outcome, Phase
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.config import NodeConfig
from fray.node.run import run_node
from tests.support.chromium import Tab, open_tab
from tests.support.ports import free_port

POLICY = """
[prices]
cpu = 0.03
memory = 0.004
"gpu:h100" = 3.5
"""
MACHINES = 24
LASTS_S = 90.0
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
KINDS = {
    "train/llama-8b": (8, 64),
    "sweep/lr-{}": (2, 16),
    "eval/mmlu-{}": (1, 8),
    "data/tokenize-{}": (0, 16),
}
"""GPUs and CPUs of jobs, by name."""


class SeededLauncher(TimerLauncher):
    """Launcher whose attempts last a seeded time; one in eight fails."""

    def __init__(self) -> None:
        super().__init__(0.0)

    async def _run(self, attempt_id: str, scope: trio.CancelScope) -> None:
        rng = random.Random(attempt_id.partition("-")[0] + attempt_id[-3:])
        lasts_s = rng.uniform(5, 50)
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.RUNNING), None)
        with scope:
            await trio.sleep(lasts_s)
        outcome = Outcome(cause=EndReason.SUCCEEDED, exit_code=0, duration_s=lasts_s, cpu_s=lasts_s * rng.uniform(1, 8))
        if scope.cancelled_caught:
            outcome = Outcome(cause=EndReason.STOPPED)
        elif rng.random() < 1 / 8:
            outcome = Outcome(cause=EndReason.FAILURE, exit_code=1, message=OUT_OF_MEMORY, raised=True)
        self.on_observed(ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome), None)


async def run_machine(number: int, port: int) -> None:
    """Run one simulated machine; two of three have 8 GPUs."""
    name = f"gpu-{number:02}" if number % 3 else f"cpu-{number:02}"
    devices = tuple(Device(f"gpu-{index}", "gpu", "h100") for index in range(8)) if number % 3 else ()
    capacity = Capacity(96_000, 512 * GB, 1 << 40, devices=devices, attributes={"zone": f"zone-{'ab'[number % 2]}"})
    address = f"tcp:127.0.0.1:{port}"
    config = NodeConfig(name=name, controller=address, token=TOKEN, capacity=capacity, state_dir="")
    await run_node(config, WebSocketNetwork(), SeededLauncher(), rng=random.Random(name))


async def run_jobs(port: int) -> None:
    """Launch seeded jobs, each with a moment after the one before, until cancelled."""
    rng = random.Random(20)
    address = f"fray://127.0.0.1:{port}"
    async with fray.open_cluster(address, token=TOKEN, logs=False, namespace="lab") as cluster:
        number = 0
        while True:
            name = rng.choice(list(KINDS))
            gpus, cpus = KINDS[name]
            need = ResourceConfig.with_cpu(cpu=cpus, memory="32GB")
            if gpus:
                need = ResourceConfig.with_gpu("h100", gpus, cpu=cpus, memory="64GB")
            number += 1
            program = Entrypoint.from_binary("true", [])
            title = name.format(number) if "{}" in name else f"{name}-{number}"
            await cluster.launch(JobRequest(title, need, program, detached=True))
            await trio.sleep(rng.uniform(0.3, 1.2))


async def take(tab: Tab, url: str, directory: Path) -> None:
    """Take the screenshots."""
    await tab.resize(1200, 640)
    await tab.open(url)
    await tab.wait_for("document.querySelectorAll('#capacity .card').length >= 3")
    await tab.wait_for("document.querySelector('svg.chart')")
    await shoot(tab, directory / "dashboard-overview.png")
    await tab.evaluate("location.hash = '#/jobs?flat=1'")
    await tab.wait_for("[...document.querySelectorAll('.row')].some((row) => /\\d\\.\\d\\d/.test(row.innerText))")
    await shoot(tab, directory / "dashboard-jobs.png")
    await tab.evaluate("location.hash = '#/history?by=job&sort=-cost'")
    await tab.wait_for("document.querySelectorAll('.row').length > 1")
    await tab.prefer("dark")
    await tab.resize(1200, 400)
    await shoot(tab, directory / "dashboard-history.png")
    assert tab.errors == [], tab.errors


async def shoot(tab: Tab, path: Path) -> None:
    data = await tab.screenshot()
    await trio.Path(path).write_bytes(data)
    print(f"{path.name}: {len(data) / 1000:.0f} kB", flush=True)


async def run(directory: Path, images: Path) -> None:
    """Run the cluster and take the screenshots."""
    port = free_port()
    (directory / "policy.toml").write_text(POLICY)
    daemon = ControllerDaemon(directory, port, options=("--policy", str(directory / "policy.toml")))
    dashboard = None
    try:
        async with trio.open_nursery() as nursery:
            daemon.start()
            await daemon.wait_listening()
            for number in range(MACHINES):
                nursery.start_soon(run_machine, number, port)
            nursery.start_soon(run_jobs, port)
            dashboard, url = await trio.to_thread.run_sync(start_dashboard, port)
            await trio.sleep(LASTS_S)
            async with open_tab() as tab:
                await take(tab, url, images)
            nursery.cancel_scope.cancel()
    finally:
        end(daemon, dashboard)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.screenshots", description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="directory for the PNG files")
    options = parser.parse_args()
    options.images.mkdir(parents=True, exist_ok=True)
    # Jobs that wait for GPUs warn.
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        trio.run(run, Path(directory), options.images)


if __name__ == "__main__":
    main()
