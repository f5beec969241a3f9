"""The blocking API on threads: `LocalCluster` on any thread, ends of jobs, and threads that cannot be killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.lowlevel

import fray
from fray import blocking
from fray.blocking import Entrypoint, Job, JobRequest, JobState, LocalCluster
from tests.support import job_functions

SMALL = blocking.ResourceConfig.with_cpu(cpu=0.1, memory="100MB")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster(logs=False, grace_s=5.0)
    yield cluster
    cluster.close()


def job(fn: Any, *args: Any, name: str = "job") -> JobRequest:
    return JobRequest(name=name, resources=SMALL, entrypoint=Entrypoint.from_callable(fn, args=args))


# Which cluster -------------------------------------------------------------------------------------------------------


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, with no cluster chosen."""
    chosen = {**{key: value for key, value in os.environ.items() if not key.startswith("FRAY_")}, **environ}
    return subprocess.run(
        [sys.executable, "-c", script], env=chosen, capture_output=True, text=True, timeout=60, check=False
    )


RACE = """
import os, sys, threading, time
import fray
from fray.blocking import Entrypoint, JobRequest, current_cluster
from fray.blocking.bridge import background_loop

found, together = [], threading.Barrier(16)

def ask():
    together.wait()
    found.append(current_cluster())

threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(set(map(id, found))), type(found[0]).__name__, sum(t.name == "fray-loop" for t in threading.enumerate()))

def hang():
    time.sleep(1000)

job = found[0].launch(JobRequest(name="hang", entrypoint=Entrypoint.from_callable(hang)))
job.wait_running()
job.terminate()
print(found[0].poll(job).state)

held = threading.Event()

def hold():
    with background_loop.opening:
        held.set()
        time.sleep(1000)

threading.Thread(target=hold, daemon=True).start()
held.wait()
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    try:
        found[0].list_jobs()
    except fray.FrayError as error:
        print("refused" if "forked" in str(error) else error)
    print(current_cluster() is found[0], flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_concurrent_threads_share_a_cluster_and_the_process_exits_before_its_threads() -> None:
    began = time.monotonic()
    done = run(RACE)
    assert done.stdout.splitlines() == ["1 LocalCluster 1", "stopped", "refused", "False", "0"], done.stderr
    assert done.returncode == 0
    assert "1 of its threads is still in user code after 2 s: fray-hang-" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 20


def test_the_last_one_opened_is_the_current_one_until_it_is_closed(cluster: LocalCluster) -> None:
    assert blocking.current_cluster() is cluster
    inner = LocalCluster(logs=False)
    assert blocking.current_cluster() is inner
    inner.close()
    assert blocking.current_cluster() is cluster
    assert isinstance(blocking.open_cluster("local?", logs=False), LocalCluster) is True
    blocking.current_cluster().close()
    assert blocking.current_cluster() is cluster


def test_a_job_of_a_local_cluster_finds_a_local_cluster(cluster: LocalCluster) -> None:
    kinds = cluster.launch(job(kinds_here)).wait()
    assert kinds == ("LocalCluster", "ClusterResolver", cluster.namespace)


def kinds_here() -> tuple[str, str, str]:
    context = blocking.ActorContext.from_environment()
    return type(context.cluster).__name__, type(context.resolver).__name__, context.namespace


def test_blocking_code_works_in_the_thread_of_an_asyncio_loop_as_in_a_notebook(cluster: LocalCluster) -> None:
    async def cell() -> Any:
        counter = blocking.current_cluster().create_actor(Counter)
        with blocking.WorkerPool(blocking.current_cluster(), 1, SMALL) as pool:
            first = [future.result() for future in pool.map(job_functions.double, range(3))]
        return first, counter.add(1), await asyncio.to_thread(counter.add, 1), counter.add.remote(1).result(5)

    assert asyncio.run(cell()) == ([0, 2, 4], 1, 2, 3)


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


def test_an_address_without_a_scheme_is_that_of_a_controller() -> None:
    with pytest.raises(fray.Unreachable, match="no controller listens at 127"):
        blocking.FrayCluster("127.0.0.1:9", token="t")


# Ends ----------------------------------------------------------------------------------------------------------------

RELEASED = threading.Event()
WAITING = threading.Semaphore(0)
"""Released once by each thread that begins to wait for `RELEASED`."""


def wait_released() -> None:
    WAITING.release()
    RELEASED.wait(60)


class Stubborn:
    def wait(self) -> None:
        wait_released()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    RELEASED.clear()
    while WAITING.acquire(blocking=False):
        pass
    yield RELEASED
    RELEASED.set()


def test_terminated_jobs_have_stopped_when_terminate_returns(cluster: LocalCluster, released: threading.Event) -> None:
    one, *others = cluster.launch(job(wait_released), count=4)
    asleep = cluster.launch(job(job_functions.hang, name="asleep"))
    group = cluster.launch_group([job(wait_released, name="left"), job(wait_released, name="right")])
    for each in (one, *others, asleep, *group):
        each.wait_running()
    one.terminate()
    assert one.info.state is JobState.STOPPED
    assert cluster.poll(one).state is JobState.STOPPED
    assert cluster.terminate([*others, asleep]) == [*others, asleep]
    assert {cluster.poll(each).state for each in (*others, asleep)} == {JobState.STOPPED}
    group.terminate()
    assert {cluster.poll(each).state for each in group} == {JobState.STOPPED}
    one.terminate()  # harmless the second time


def test_leaving_names_the_threads_that_are_left(released: threading.Event) -> None:
    cluster = LocalCluster(logs=False, grace_s=0.05)
    hanging = cluster.launch(job(wait_released, name="hanging"))
    cluster.create_actor(Stubborn, name="stubborn").wait.remote()
    cluster.create_host(name="shared").create_actor(Stubborn).wait.remote()
    for _ in range(3):
        assert WAITING.acquire(timeout=20)
    hanging.terminate()
    with pytest.warns(RuntimeWarning, match="of its threads are still in user code after 0.05 s") as warned:
        cluster.close()
    said = str(warned[0].message)
    for name in (f"fray-{hanging}", "fray-stubborn", "fray-light-"):
        assert name in said


def test_leaving_waits_for_threads_that_return_in_time_without_a_warning(
    released: threading.Event, recwarn: pytest.WarningsRecorder
) -> None:
    cluster = LocalCluster(logs=False, grace_s=30.0)
    hanging = cluster.launch(job(wait_released))
    hanging.wait_running()
    hanging.terminate()
    threading.Timer(0.1, released.set).start()
    cluster.close()
    assert released.is_set()
    assert list(recwarn) == []


def test_serve_ends_with_its_job_and_with_shutdown(cluster: LocalCluster) -> None:
    served = cluster.launch(job(serve))
    blocking.ClusterResolver(cluster).lookup("counter").wait_for_size(1)
    served.terminate()
    server = blocking.ActorServer(cluster)
    thread = threading.Thread(target=server.serve)
    thread.start()
    while True:
        try:
            assert server.address
            break
        except fray.FrayError:
            time.sleep(0.001)
    server.shutdown()
    thread.join(10)
    assert not thread.is_alive()


def serve() -> None:
    server = blocking.ActorServer(blocking.current_cluster())
    server.register("counter", Counter())
    server.serve()


async def test_an_impossible_grace_period_is_refused() -> None:
    with pytest.raises(fray.InvalidRequest, match="must be 0 or more seconds"):
        async with fray.open_cluster("local", grace_s=-1):
            await trio.lowlevel.checkpoint()


# Words ---------------------------------------------------------------------------------------------------------------


def test_a_job_is_a_string_and_can_be_pickled(cluster: LocalCluster) -> None:
    done = cluster.launch(job(job_functions.double, 4, name="double"))
    assert done.wait() == 8
    assert isinstance(done, str)
    assert (done, f"{done}", {done: 1}[done.id]) == (done.id, done.id, 1)
    assert type(str(done)) is str
    assert cluster.launch(job(ask, done)).wait() == (8, "double", JobState.SUCCEEDED, JobState.SUCCEEDED)


def ask(other: Job) -> tuple[Any, str, JobState, JobState]:
    return other.wait(10), other.name, other.info.state, blocking.current_cluster().poll(other).state
