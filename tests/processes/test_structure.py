"""P1 and P2 across processes: whichever process dies, nothing below it is left, and its neighbours live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.timed

GONE_WITHIN_S = 1.0
DRIVER = """
import os, subprocess, sys, time
import trio, fray

def storm():
    # grandchildren, a session of its own, and a daemon that has forked twice
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "(setsid sleep 1000 &) ; exit 0"]).wait()
    print("storm is up", flush=True)
    time.sleep(1000)

class Hub:
    async def pid(self):
        return os.getpid()

async def main():
    unrelated = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={**os.environ, "BESIDE_MARK": "1"})
    print("unrelated", unrelated.pid, flush=True)
    async with fray.open_cluster("machine?nodes=2&cpu=4") as cluster:
        async with cluster.open_scope("run") as scope:
            hub = await scope.create_actor(Hub, on_failure=ON_FAILURE)
            print("actor", await hub.pid(), flush=True)
            jobs = [await scope.launch(fray.JobRequest(name=f"storm-{i}",
                    entrypoint=fray.Entrypoint.from_callable(storm)), on_failure=ON_FAILURE) for i in range(2)]
            for job in jobs:
                info = await job.wait_running()
                print("job", info.attempts[-1].pid, flush=True)
            for node in await cluster.nodes():
                print("node", node.pid, flush=True)
            print("ready", flush=True)
            for job in jobs:
                info = await job.wait_ended()
                print("ended", info.cause, flush=True)

trio.run(main)
"""


def marked(mark: str, *, beside: bool = False) -> list[int]:
    """Living processes that carry the mark of this test in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in environ and state != "Z" and (b"BESIDE_MARK" in environ) == beside:
            found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    return parent_of(pid) is not None


def parent_of(pid: int) -> int | None:
    """None for a process that is gone, or dead and not reaped."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def descendants(pid: int) -> list[int]:
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [below for child in children for below in descendants(child)]


class Driver:
    """A driver script in a process of its own, up to its last line of output."""

    def __init__(self, tmp_path: Path, script: str) -> None:
        self.mark = uuid.uuid4().hex
        path = tmp_path / "driver.py"
        path.write_text(script)
        self.errors = (tmp_path / "stderr").open("w+")
        environ = {**os.environ, "TEST_MARK": self.mark, "PYTHONPATH": os.getcwd()}
        self.process = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environ
        )
        self.said: dict[str, list[int]] = {}
        self.lines: list[str] = []

    def wait_line(self, wanted: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            word, _, value = line.strip().partition(" ")
            if value.isdigit():
                self.said.setdefault(word, []).append(int(value))
            if wanted in line:
                return line
        self.errors.seek(0)
        raise AssertionError(f"the driver ended before {wanted!r}: {self.lines}\n{self.errors.read()}")

    def wait_storms(self) -> None:
        while sum("storm is up" in line for line in self.lines) < 2 or "ready" not in self.lines:
            self.wait_line("")

    def others(self) -> list[int]:
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def wait_gone(self, within_s: float) -> list[int]:
        give_up_at = time.monotonic() + within_s
        while (left := self.others()) and time.monotonic() < give_up_at:
            time.sleep(0.02)  # the process table has no event to wait for
        return left

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in marked(self.mark) + marked(self.mark, beside=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.errors.close()


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[list[Driver]]:
    running: list[Driver] = []
    yield running
    for driver in running:
        driver.close()


def start(drivers: list[Driver], tmp_path: Path, on_failure: str = "escalate") -> Driver:
    driver = Driver(tmp_path, DRIVER.replace("ON_FAILURE", repr(on_failure)))
    drivers.append(driver)
    driver.wait_storms()
    return driver


@pytest.mark.promise("P1")
def test_kill_9_of_the_driver_leaves_nothing_below_and_what_is_beside(drivers: list[Driver], tmp_path: Path) -> None:
    driver = start(drivers, tmp_path)
    driver.process.kill()
    driver.process.wait()
    assert driver.wait_gone(GONE_WITHIN_S) == []
    assert marked(driver.mark, beside=True) == driver.said["unrelated"]


def test_ctrl_c_ends_the_cluster_in_order_and_quietly(drivers: list[Driver], tmp_path: Path) -> None:
    driver = start(drivers, tmp_path)
    driver.process.send_signal(signal.SIGINT)
    driver.process.wait(timeout=15)
    assert driver.others() == []
    driver.errors.seek(0)
    said = driver.errors.read()
    assert "ExceptionGroup" not in said
    assert said.count("Traceback") <= 1  # the driver's own, of its KeyboardInterrupt
    assert marked(driver.mark, beside=True) == driver.said["unrelated"]


@pytest.mark.promise("P2")
def test_kill_9_of_a_job_ends_its_descendants_and_fails_the_scope(drivers: list[Driver], tmp_path: Path) -> None:
    driver = start(drivers, tmp_path)
    os.kill(driver.said["job"][0], signal.SIGKILL)
    assert driver.process.wait(timeout=15) == 1
    assert driver.others() == []
    driver.errors.seek(0)
    said = driver.errors.read()
    assert "JobFailed" in said
    assert "SIGKILL" in said


def test_kill_9_of_a_shim_ends_its_attempt_and_no_other(drivers: list[Driver], tmp_path: Path) -> None:
    driver = start(drivers, tmp_path, on_failure="absorb")
    job = driver.said["job"][0]
    shim = int(Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(shim, signal.SIGKILL)
    assert "ended" in driver.wait_line("ended")
    assert not Path(f"/proc/{job}").exists()
    assert Path(f"/proc/{driver.said['job'][1]}").exists()


def test_kill_9_of_a_node_ends_what_it_ran_and_its_jobs_start_elsewhere(drivers: list[Driver], tmp_path: Path) -> None:
    driver = start(drivers, tmp_path, on_failure="absorb")
    below, node = max(((descendants(node), node) for node in driver.said["node"]), key=lambda found: len(found[0]))
    assert len(below) > 3, "a node with a storm below it"
    os.kill(node, signal.SIGKILL)
    give_up_at = time.monotonic() + GONE_WITHIN_S
    while (left := [pid for pid in below if alive(pid)]) and time.monotonic() < give_up_at:
        time.sleep(0.02)  # the process table has no event to wait for
    assert left == []
    driver.wait_line("storm is up")
    assert driver.process.poll() is None
