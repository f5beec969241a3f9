"""The blocking face at the edges of a process: its exit, Ctrl-C, a fork, and death."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.processes.test_structure import GONE_WITHIN_S, Driver, drivers

__all__ = ["drivers"]  # a fixture

BEGIN = """
import os, sys, threading, time
from fray.blocking import open_cluster

class Hub:
    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)

cluster = open_cluster("machine?nodes=1&cpu=4", logs=False)
hub = cluster.create_actor(Hub)
print("hub", hub.pid(), flush=True)
"""


def run(drivers: list[Driver], tmp_path: Path, script: str) -> Driver:
    drivers.append(Driver(tmp_path, BEGIN + script))
    return drivers[-1]


def errors(driver: Driver) -> str:
    driver.errors.seek(0)
    return driver.errors.read()


@pytest.mark.timed
def test_a_cluster_that_was_never_closed_ends_with_the_interpreter(drivers: list[Driver], tmp_path: Path) -> None:
    driver = run(drivers, tmp_path, "pending = hub.sleep.remote(1000)\nprint('leaving', flush=True)\n")
    driver.wait_line("leaving")
    began = time.monotonic()
    assert driver.process.wait(15) == 0
    assert driver.wait_gone(GONE_WITHIN_S) == []
    assert time.monotonic() - began < 8
    assert "Traceback" not in errors(driver)


def test_a_thread_that_waits_for_a_call_keeps_the_process_as_any_thread_does(
    drivers: list[Driver], tmp_path: Path
) -> None:
    script = "threading.Thread(target=lambda: print('slept', hub.sleep(0.3), flush=True)).start()\n"
    driver = run(drivers, tmp_path, script)
    assert driver.wait_line("slept").split() == ["slept", "None"]
    assert driver.process.wait(15) == 0
    assert driver.wait_gone(GONE_WITHIN_S) == []


def test_ctrl_c_in_a_waiting_driver_comes_as_keyboardinterrupt_and_ends_everything(
    drivers: list[Driver], tmp_path: Path
) -> None:
    driver = run(drivers, tmp_path, "print('waiting', flush=True)\nhub.sleep(1000)\n")
    driver.wait_line("waiting")
    time.sleep(0.1)  # into the wait, most likely; a moment earlier is as good
    driver.process.send_signal(signal.SIGINT)
    assert driver.process.wait(15) == -signal.SIGINT
    assert driver.wait_gone(GONE_WITHIN_S) == []
    assert errors(driver).rstrip().endswith("KeyboardInterrupt")


def test_kill_9_of_a_sync_driver_leaves_nothing(drivers: list[Driver], tmp_path: Path) -> None:
    driver = run(drivers, tmp_path, "print('waiting', flush=True)\nhub.sleep(1000)\n")
    driver.wait_line("waiting")
    driver.process.kill()
    driver.process.wait()
    assert driver.wait_gone(GONE_WITHIN_S) == []


FORK = """
pid = os.fork()
if pid == 0:
    for ask in (hub.pid, lambda: cluster.list_jobs(), lambda: hub.pid.remote()):
        try:
            ask()
        except Exception as error:
            print("refused", "forked" in str(error), flush=True)
    with open_cluster("local", logs=False) as own:
        print("own", own.create_actor(Hub).pid() == os.getpid(), flush=True)
    sys.exit(0)
print("child", os.waitpid(pid, 0)[1], flush=True)
print("still", hub.pid(), flush=True)
cluster.close()
print("closed", flush=True)
"""


def test_a_forked_child_gets_an_error_and_may_open_a_cluster_of_its_own(drivers: list[Driver], tmp_path: Path) -> None:
    driver = run(drivers, tmp_path, FORK)
    driver.wait_line("closed")
    assert driver.lines[1:6] == ["refused True"] * 3 + ["own True", "child 0"]
    assert driver.said["still"] == driver.said["hub"]
    assert driver.process.wait(15) == 0
    assert driver.wait_gone(GONE_WITHIN_S) == []
