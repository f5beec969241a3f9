"""`FrayClient` at the edges of a process: its exit, a fork, what dies; and on a running cluster."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.processes.lab import TOKEN, Lab
from tests.processes.test_structure import GONE_WITHIN_S, Driver, drivers

sys.path.append(str(Path(__file__).parent.parent / "v2"))

import v2_contract as contract

from fray.v2 import FrayClient, JobStatus, client, current_client

__all__ = ["drivers"]  # a fixture

BEGIN = """
import os, sys, threading, time
from fray.v2 import ActorConfig, Entrypoint, FrayClient, JobRequest, current_client, current_actor, set_current_client

class Hub:
    def seen_by_a_thread(self):
        thread = threading.Thread(target=self.look)
        thread.start()
        thread.join()
        return self.seen

    def look(self):
        self.seen = current_actor().group_name + " " + type(current_client()).__name__

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)

    def die(self):
        os._exit(9)

def job(fn, *args, name="job"):
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn, args=args))
"""


def run(drivers: list[Driver], tmp_path: Path, script: str, **variables: str) -> Driver:
    os.environ.update(variables)
    try:
        drivers.append(Driver(tmp_path, BEGIN + script))
    finally:
        for name in variables:
            del os.environ[name]
    return drivers[-1]


def errors(driver: Driver) -> str:
    driver.errors.seek(0)
    return driver.errors.read()


def assert_leaves_in_order(driver: Driver) -> None:
    began = time.monotonic()
    assert driver.process.wait(15) == 0, errors(driver)
    assert driver.wait_gone(GONE_WITHIN_S) == []
    assert time.monotonic() - began < 8
    assert "Traceback" not in errors(driver)


LEAVING = """
client = current_client()
assert isinstance(client, FrayClient) and current_client() is client, client
hub = client.create_actor(Hub, name="hub")
print("seen", hub.seen_by_a_thread(), flush=True)
began = client.submit(job(time.sleep, 1000))
pending = hub.sleep.remote(1000)
while began.status() != "running":
    time.sleep(0.01)
waiting = [threading.Thread(target=hub.sleep, args=(1000,), daemon=True) for _ in range(3)]
for thread in waiting:
    thread.start()
print("leaving", flush=True)
"""


@pytest.mark.timed
def test_the_shared_client_ends_with_the_interpreter_jobs_and_all(drivers: list[Driver], tmp_path: Path) -> None:
    """And code of threads that an actor started finds its actor, and the client of its job."""
    driver = run(drivers, tmp_path, LEAVING, FRAY_CLIENT_SPEC="machine?nodes=1&cpu=4")
    driver.wait_line("leaving")
    assert "seen hub FrayClient" in driver.lines
    assert_leaves_in_order(driver)


FORK = """
client = FrayClient("machine?nodes=1&cpu=4", logs=False)
with client:
    hub = client.create_actor(Hub, name="hub")
    print("hub", hub.pid(), flush=True)
    pending, running = client.create_actor(Hub, name="sleepy").sleep.remote(1000), client.submit(job(time.sleep, 1000))
    pid = os.fork()
    if pid == 0:
        with client:
            asked = (hub.pid, lambda: client.submit(job(print)), lambda: client.create_actor(Hub, name="other"))
            for ask in (*asked, pending.result, lambda: pending.result(1000), running.status, running.wait):
                try:
                    ask()
                except RuntimeError as error:
                    print("refused", "forked" in str(error) and "spawn" in str(error), flush=True)
        with FrayClient("local", logs=False) as own:
            print("own", own.create_actor(Hub, name="hub").pid() == os.getpid(), flush=True)
        sys.exit(0)
    print("child", os.waitpid(pid, 0)[1], flush=True)
    print("still", hub.pid(), flush=True)
    running.terminate()
print("closed", flush=True)
"""


def test_after_a_fork_the_child_gets_advice_and_ends_nothing(drivers: list[Driver], tmp_path: Path) -> None:
    driver = run(drivers, tmp_path, FORK)
    driver.wait_line("closed")
    assert driver.lines[1:10] == ["refused True"] * 7 + ["own True", "child 0"]
    assert driver.said["still"] == driver.said["hub"]
    assert_leaves_in_order(driver)


DYING = """
with FrayClient("machine?nodes=1&cpu=4", logs=False) as client:
    hub = client.create_actor(Hub, name="hub", actor_config=ActorConfig(max_restarts=1))
    first = hub.pid()
    for word in ("first", "last"):
        try:
            hub.die()
        except RuntimeError as error:
            print(word, type(error).__name__, flush=True)
        if word == "first":
            print("restarted", hub.pid() != first, flush=True)
    try:
        hub.pid()
    except RuntimeError as error:
        print("dead", type(error).__name__, flush=True)
    killed = client.submit(job(os._exit, 5, name="killed"))
    try:
        killed.wait()
    except RuntimeError as error:
        print("killed", type(error).__name__, "exit code 5" in error.__notes__[0], flush=True)
"""


def test_what_dies_is_a_runtimeerror_and_restarts_as_often_as_it_may(drivers: list[Driver], tmp_path: Path) -> None:
    driver = run(drivers, tmp_path, DYING + "print('over', flush=True)\n")
    driver.wait_line("over")
    assert driver.lines == [
        "first OutcomeUnknown",
        "restarted True",
        "last OutcomeUnknown",
        "dead ActorDied",
        "killed JobFailed True",
        "over",
    ]
    assert_leaves_in_order(driver)


# On a running cluster ------------------------------------------------------------------------------------------------


def test_a_running_cluster_is_one_client_a_process(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the contract says where much of Fray takes part."""
    lab.start_controller()
    lab.start_node("one")
    lab.start_node("two")
    lab.wait_serving()
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)
    monkeypatch.setenv("FRAY_CLIENT_SPEC", lab.spec)
    shared = current_client()
    assert shared is client.client_of(lab.spec)
    with shared:
        shared.cluster.wait_for_nodes(2)
        whole = contract.Capabilities(runs_async=True)
        for number, test in enumerate(ROUND):
            place = tmp_path / f"{number}"
            place.mkdir()
            known = {"client": shared, "tmp_path": place, "capabilities": whole}
            test(**{name: known[name] for name in test.__code__.co_varnames[: test.__code__.co_argcount]})
    with pytest.raises(RuntimeError, match="shut down"):
        shared.submit(contract.request(contract.do_nothing))
    with current_client() as again:
        assert again is not shared
        job = again.submit(contract.request(contract.do_nothing))
        assert job.wait(contract.LATE_S) == JobStatus.SUCCEEDED
    with pytest.raises(ConnectionError):
        FrayClient("fray://127.0.0.1:1", token="none")


ROUND = [
    contract.test_a_coordinator_job_submits_jobs_and_waits_for_them,
    contract.test_a_jobs_logs_are_text,
    contract.test_a_handle_can_be_passed_to_jobs_and_actors,
    contract.test_the_names_of_a_group_no_longer_answer_after_shutdown,
    contract.test_a_group_can_be_passed_to_a_job,
    contract.test_a_hosted_actor_lives_in_its_callers_process,
    contract.test_a_job_hosts_an_actor_for_its_own_jobs,
]
