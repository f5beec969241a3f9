"""The blocking API: sync code on any thread, in a local cluster and over processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio

import fray
from fray import blocking
from fray.blocking import ActorHandle, Cluster, Entrypoint, JobRequest, Scope
from tests.support import job_functions


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def countdown(self) -> Iterator[int]:
        yield from range(self.n, 0, -1)

    def where(self, ctx: blocking.ActorContext, name: str) -> Any:
        pool = ctx.resolver.lookup(name)
        pool.wait_for_size(1, timeout=5)
        return type(ctx).__module__, pool.call().add(1)

    def pass_on(self, other: ActorHandle, k: int) -> int:
        return int(other.add(k)) * 100


class Gate:
    """Lives in the loop."""

    def __init__(self) -> None:
        self.open_ = trio.Event()
        self.cancelled = 0

    async def wait(self, value: int = 0) -> int:
        try:
            await self.open_.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        return value

    async def open(self) -> int:
        self.open_.set()
        return self.cancelled

    async def times_cancelled(self) -> int:
        return self.cancelled

    def from_the_loop(self, other: ActorHandle) -> int:
        return int(other.add(1))


@pytest.fixture(scope="module", params=["local", "machine?nodes=1&cpu=8"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with blocking.open_cluster(request.param, logs=False) as cluster:
        yield cluster


@pytest.fixture
def scope(cluster: Cluster) -> Iterator[Scope]:
    with cluster.open_scope("test") as scope:
        yield scope


def job(name: str, fn: object, *args: object) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn, args=args))  # type: ignore[arg-type]


# Jobs and scopes -----------------------------------------------------------------------------------------------------


def test_a_job_returns_its_value_and_raises_its_error(cluster: Cluster) -> None:
    assert cluster.launch(job("double", job_functions.double, 21)).wait() == 42
    failed = cluster.launch(job("bad", job_functions.fail, "boom"))
    with pytest.raises(ValueError, match="boom") as caught:
        failed.wait()
    assert "job_functions.py" in caught.value.__cause__.text
    assert cluster.wait(failed).state is fray.JobState.FAILED
    assert cluster.wait([failed.id])[0].cause is fray.EndReason.FAILURE
    assert cluster.poll(failed).job_id == failed.id


def nested() -> tuple[int, int, bool]:
    from fray.blocking import current_cluster, open_cluster

    inner = current_cluster().launch(job("inner", job_functions.double, 4))
    loops = [thread for thread in threading.enumerate() if thread.name == "fray-loop"]
    return inner.wait(), len(loops), open_cluster() is current_cluster()


def test_an_unpickled_job_is_followed_and_an_ended_one_needs_no_cluster(cluster: Cluster) -> None:
    made = cluster.launch(job("add", job_functions.double, 21))
    assert made.wait() == 42
    arrived = pickle.loads(pickle.dumps(made))
    assert arrived.wait(timeout=10) == 42, "a driver's thread has no cluster of its own: it is that which is open"
    assert pickle.loads(pickle.dumps(made)).id == made
    seen = pickle.loads(pickle.dumps(made))
    while not seen.done():
        time.sleep(0.01)
    assert seen.wait(timeout=0) == 42
    with blocking.open_cluster("local", logs=False) as other:
        ended = other.launch(job("ended", job_functions.double, 1))
        ended.wait()
    assert ended.wait(timeout=0) == 2


def test_sync_code_of_a_job_uses_the_loop_of_its_process(cluster: Cluster) -> None:
    assert cluster.launch(job("outer", nested)).wait() == (8, 1, True)


def test_a_late_wait_raises_the_built_in_timeout_and_may_be_repeated(cluster: Cluster) -> None:
    hanging = cluster.launch(job("hang", job_functions.hang))
    with pytest.raises(TimeoutError, match="has not ended"):
        hanging.wait(timeout=0.01)
    hanging.terminate()
    with pytest.raises(fray.JobStopped):
        hanging.wait(timeout=10)


def test_a_failed_child_ends_the_waits_of_the_body_and_fails_the_scope(cluster: Cluster) -> None:
    with pytest.raises(ExceptionGroup) as caught, cluster.open_scope("run") as scope:
        hanging = scope.launch(job("hang", job_functions.hang))
        hanging.wait_running()
        scope.launch(job("bad", job_functions.fail, "boom"))
        hanging.wait()
    assert caught.group_contains(ValueError, match="boom", depth=1)
    assert isinstance(caught.value.__context__, fray.ScopeCancelled)
    assert hanging.info.state is fray.JobState.STOPPED


def test_an_error_of_the_body_ends_the_children_and_is_raised_in_a_group(cluster: Cluster) -> None:
    with pytest.raises(ExceptionGroup) as caught, cluster.open_scope("run") as scope:
        hanging = scope.launch(job("hang", job_functions.hang))
        hanging.wait_running()
        raise LookupError("mine")
    assert caught.group_contains(LookupError, match="mine", depth=1)
    assert hanging.info.state is fray.JobState.STOPPED


# Actors --------------------------------------------------------------------------------------------------------------


def test_a_method_call_waits_and_remote_gives_a_future_in_order(scope: Scope) -> None:
    counter = scope.create_actor(Counter, 10)
    assert counter.add(5) == 15
    futures = [counter.add.remote(1) for _ in range(500)]
    assert [future.result() for future in futures] == list(range(16, 516))
    assert futures[0].result() is futures[0].result()
    with pytest.raises(ValueError, match="no") as caught:
        counter.fail("no")
    assert isinstance(caught.value.__cause__, fray.errors.RemoteTraceback)
    with pytest.raises(AttributeError, match="did you mean add"):
        counter.ad(1)


def test_result_and_exception_wait_for_the_outcome_as_long_as_asked(scope: Scope) -> None:
    gate = scope.create_actor(Gate)
    future = gate.wait.remote(7)
    assert (future.done(), future.cancelled(), future.running()) == (False, False, False)
    for timeout in (0.01, 0, -1):
        for wait in (future.result, future.exception):
            with pytest.raises(TimeoutError, match="ask again"):
                wait(timeout)
    gate.open()
    assert future.result(5) == 7
    assert (future.done(), future.exception(), future.cancel()) == (True, None, False)


def test_a_cancelled_future_cancels_the_method(scope: Scope) -> None:
    gate = scope.create_actor(Gate)
    future = gate.wait.remote()
    gate.times_cancelled()
    assert future.cancel()
    with pytest.raises(fray.CallCancelled, match="cancelled by its caller") as caught:
        future.result(5)
    assert isinstance(caught.value, concurrent.futures.CancelledError)
    assert (future.cancelled(), future.cancel(), future.exception()) == (True, False, caught.value)
    assert gate.open() == 1


def test_futures_are_those_of_concurrent_futures(scope: Scope) -> None:
    gate, counter = scope.create_actor(Gate), scope.create_actor(Counter)
    pending, returned, failed = gate.wait.remote(1), counter.add.remote(2), counter.fail.remote("no")
    wait = concurrent.futures.wait
    assert wait([pending, returned], 10, concurrent.futures.FIRST_COMPLETED).done == {returned}
    assert wait([pending, failed], 10, concurrent.futures.FIRST_EXCEPTION).done == {failed}
    assert isinstance(failed.exception(), ValueError)
    gate.open()
    futures = [pending, returned]
    assert {future.result() for future in concurrent.futures.as_completed(futures, timeout=10)} == {1, 2}
    assert wait([pending, returned, failed]).not_done == set()


def test_asyncio_awaits_and_cancels_futures(scope: Scope) -> None:
    gate, counter = scope.create_actor(Gate), scope.create_actor(Counter)

    async def main() -> None:
        assert await asyncio.wrap_future(counter.add.remote(2)) == 2
        with pytest.raises(ValueError, match="no") as caught:
            await asyncio.wrap_future(counter.fail.remote("no"))
        assert isinstance(caught.value.__cause__, fray.errors.RemoteTraceback)
        call = gate.wait.remote()
        waiting = asyncio.wrap_future(call)
        await asyncio.wrap_future(gate.times_cancelled.remote())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(concurrent.futures.wait, [call], 10)
        assert call.cancelled()

    asyncio.run(main())
    assert gate.open() == 1


def test_a_deadline_ends_the_wait_also_if_the_method_cannot_be_cancelled(scope: Scope) -> None:
    counter = scope.create_actor(Counter)
    counter.add(0)
    with pytest.raises(fray.DeadlineExceeded):
        counter.nap.options(timeout_s=0.05)(0.5)


def test_ctrl_c_reaches_a_waiting_call_and_cancels_the_method(scope: Scope) -> None:
    gate = scope.create_actor(Gate)
    gate.times_cancelled()
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            gate.wait()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    while not gate.times_cancelled():
        time.sleep(0.001)


def test_ctrl_c_while_a_scope_waits_for_its_jobs_ends_them_and_leaves_the_cluster_usable(cluster: Cluster) -> None:
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    tiny = blocking.ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
    try:
        with pytest.raises(KeyboardInterrupt), cluster.open_scope("run") as scope:
            job = scope.launch(JobRequest("hang", tiny, Entrypoint.from_binary("sleep", ["600"])))
            job.wait_running()
            timer.start()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert job.info.state == "stopped"
    assert cluster.launch(JobRequest("next", tiny, Entrypoint.from_callable(abs, args=(-7,)))).wait() == 7


def test_callbacks_run_in_the_loop_and_may_not_wait_there(scope: Scope) -> None:
    gate, counter = scope.create_actor(Gate), scope.create_actor(Counter)
    first, second = gate.wait.remote(7), gate.wait.remote(8)
    said: list[Any] = []
    finished = threading.Event()

    def callback(future: blocking.ActorFuture) -> None:
        said.append(threading.current_thread().name)
        said.append(future.result())
        pending = counter.add.remote(1)
        for forbidden in (pending.result, lambda: counter.add(1)):
            try:
                forbidden()
            except fray.FrayError as error:
                said.append("thread must not wait" in str(error))
        finished.set()

    first.add_done_callback(lambda future: 1 / 0)  # logged, and no reason to end anything
    first.add_done_callback(callback)
    gate.open()
    assert finished.wait(5)
    assert said == ["fray-loop", 7, True, True]
    assert second.result(5) == 8
    here: list[str] = []
    second.add_done_callback(lambda future: here.append(threading.current_thread().name))
    assert here == [threading.current_thread().name], "at once, where it is asked for"


def test_futures_can_be_awaited_as_they_come(scope: Scope) -> None:
    gate, counter = scope.create_actor(Gate), scope.create_actor(Counter)
    slow, fast = gate.wait.remote(1), counter.add.remote(2)
    assert blocking.wait_any([slow, fast], timeout=5) is fast
    with pytest.raises(TimeoutError, match="1 of 2"):
        list(blocking.as_completed([slow, fast], timeout=0.01))
    gate.open()
    assert {future.result() for future in blocking.as_completed([slow, fast], timeout=5)} == {1, 2}
    with pytest.raises(ValueError, match="at least one"):
        blocking.wait_any([])


def test_any_thread_may_call_and_each_keeps_its_order(scope: Scope) -> None:
    counters = [scope.create_actor(Counter) for _ in range(2)]
    seen: dict[int, list[int]] = {}

    def work(number: int) -> None:
        futures = [counters[i % 2].add.remote(1) for i in range(200)]
        seen[number] = [future.result() for future in futures][::2]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers == sorted(answers) for answers in seen.values())
    assert [counter.add(0) for counter in counters] == [800, 800]


def test_calls_beyond_the_limit_of_a_host_wait_in_order(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fray.runtime.calls.host_connection.OPEN_CALLS_LIMIT", 16)
    counter = scope.create_actor(Counter)
    counter.add(0)
    assert [future.result(10) for future in [counter.add.remote(1) for _ in range(500)]] == list(range(1, 501))


def test_a_stream_is_iterated_and_closed_early(scope: Scope) -> None:
    counter = scope.create_actor(Counter, 200)
    with counter.countdown.stream() as items:
        assert list(items) == list(range(200, 0, -1))
    with counter.countdown.stream() as items:
        assert next(items) == 200
    assert counter.add(0) == 200


class Talker:
    def running(self, numbers: fray.BlockingStream) -> Iterator[int]:
        total = 0
        for number in numbers:
            total += number
            yield total


def test_a_duplex_stream_sends_and_receives_and_an_actor_has_metrics(scope: Scope) -> None:
    talker = scope.create_actor(Talker)
    with talker.running.open() as stream:
        stream.send(1)
        assert stream.receive() == 1
        for number in range(2, 50):
            stream.send(number)
        stream.done_sending()
        assert list(stream)[-1] == sum(range(50))
        assert stream.result() is None
        with pytest.raises(trio.EndOfChannel):
            stream.receive()
    seen = blocking.metrics_of(talker)
    assert (seen.calls, seen.errors, seen.running) == (1, 0, 0)


def test_a_group_is_waited_for_called_and_ended(scope: Scope, cluster: Cluster) -> None:
    group = scope.create_actor_group(Counter, 5, count=3, on_failure="absorb")
    assert [handle.add(1) for handle in group] == [6, 6, 6]
    assert group.wait_ready(3, timeout=10) == group.handles
    assert (group.ready_count, group.is_done(), group.discover_new()) == (3, True, [])
    assert cluster.launch(job("ask", ask_all, group)).wait() == [6, 6, 6]
    group.shutdown()
    assert {str(status.value) for status in group.statuses()} == {"ended"}


def test_sync_code_calls_light_actors(scope: Scope) -> None:
    host = scope.create_host(on_failure="absorb")
    one, many = host.create_actor(Counter, 5), host.create_actors(Counter, 1, count=20)
    assert one.add(1) == 6
    assert [future.result(10) for future in [handle.add.remote(1) for handle in many]] == [2] * 20


def ask_all(group: blocking.ActorGroup) -> list[int]:
    return [handle.add(0) for handle in group.wait_ready(3, timeout=10)]


def test_unpickled_handles_work(scope: Scope, cluster: Cluster) -> None:
    counter, other = scope.create_actor(Counter), scope.create_actor(Counter)
    assert counter.pass_on(other, 3) == 300
    assert cluster.launch(job("calls", call_it, other)).wait() == 4
    again = pickle.loads(pickle.dumps(other))
    assert (again, again.add(0)) == (other, 4)
    assert other.add(0) == 4


def call_it(handle: ActorHandle) -> int:
    return int(handle.add(1))


def test_blocking_in_the_loop_is_refused_with_advice(scope: Scope) -> None:
    gate, counter = scope.create_actor(Gate), scope.create_actor(Counter)
    with pytest.raises(fray.FrayError, match="use `fray` and await"):
        gate.from_the_loop(counter)


async def test_a_native_driver_may_block_in_a_thread_and_not_in_its_loop() -> None:
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
        counter = ActorHandle(await scope.create_actor(Counter))
        with pytest.raises(fray.FrayError, match="thread must not wait"):
            counter.add(1)
        assert await trio.to_thread.run_sync(counter.add, 1) == 1
        assert await trio.to_thread.run_sync(lambda: blocking.current_cluster().namespace) == cluster.namespace


def test_handles_of_a_closed_cluster_raise() -> None:
    with blocking.open_cluster("local", logs=False) as cluster:
        counter = cluster.create_actor(Counter)
        assert counter.add(1) == 1
        pending = cluster.create_actor(Gate).wait.remote()
    with pytest.raises(fray.FrayError):
        pending.result(5)
    with pytest.raises(fray.FrayError):
        counter.add(1)
    with pytest.raises(fray.FrayError):
        cluster.list_jobs()


# Servers, resolvers, pools -------------------------------------------------------------------------------------------


def test_a_server_exposes_objects_under_names_that_resolvers_find(cluster: Cluster) -> None:
    resolver = blocking.ClusterResolver(cluster)
    with blocking.ActorServer(cluster) as server:
        server.register("count", Counter(0))
        server.register("count", Counter(100))
        server.register("other", Counter(5))
        pool = resolver.lookup("count")
        pool.wait_for_size(2, timeout=5)
        assert sorted(pool.call().add(1) for _ in range(2)) == [1, 101]
        assert pool.call("least_loaded").add.options(timeout_s=10).remote(0).result() in (1, 101)
        assert sorted(future.result() for future in pool.broadcast().add(1)) == [2, 102]
        assert pool.call().where("other") == ("fray.blocking.actor_context", 6)
        fixed = blocking.FixedResolver({"count": server.address}, cluster=cluster).lookup("count")
        fixed.wait_for_size(1, timeout=5)
        assert fixed.call().add(0) in (2, 102)
    with pytest.raises(fray.DeadlineExceeded):
        pool.wait_for_size(1, timeout=0.01)


def half_of_even(x: int) -> int:
    if x % 2:
        raise ValueError(x)
    return x // 2


def test_a_pool_of_workers_runs_tasks(cluster: Cluster) -> None:
    with blocking.WorkerPool(cluster, 2) as pool:
        pool.wait_for_workers(1)
        assert pool.submit(job_functions.double, 4).result() == 8
        assert [future.result() for future in pool.map(job_functions.double, range(20))] == list(range(0, 40, 2))
        with pytest.raises(ValueError, match="boom"):
            pool.submit(job_functions.fail, "boom").result()
        with pytest.raises(fray.NotPicklable):
            pool.submit(job_functions.double, threading.Lock())
        expected: list[tuple[int, int | None]] = []
        squares = pool.imap(
            job_functions.double, range(50), max_in_flight=7, on_progress=lambda *said: expected.append(said)
        )
        assert list(squares) == list(range(0, 100, 2))
        assert expected[-1] == (50, 50)
        assert sorted(pool.imap(job_functions.double, range(50), ordered=False, max_in_flight=7)) == list(
            range(0, 100, 2)
        )
        mixed = list(pool.imap(half_of_even, range(4), return_exceptions=True))
        assert (mixed[::2], [type(error) for error in mixed[1::2]]) == ([0, 1], [ValueError, ValueError])
        endless = pool.imap(job_functions.double, itertools.count(), max_in_flight=3)
        assert [next(endless), next(endless)] == [0, 2]
        endless.close()
    pool.shutdown()
    with pytest.raises(fray.InvalidRequest, match="is not open"):
        pool.submit(job_functions.double, 4)
