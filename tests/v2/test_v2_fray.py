"""`FrayClient` beyond the contract: names, clients, and what current code finds; in this process."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from v2_contract import LATE_S, Broken, Counter, Wrong, do_nothing, fail, new, request, use_group, wait_until, write

from fray import BlockingNotAllowed, blocking
from fray.v2 import (
    ActorConfig,
    Entrypoint,
    FrayClient,
    JobAlreadyExists,
    JobRequest,
    JobStatus,
    LocalClient,
    current_actor,
    current_client,
    set_current_client,
    wait_all,
)
from fray.v2.fray.actors import FrayActorHandle


@pytest.fixture(scope="module")
def client() -> Iterator[FrayClient]:
    with FrayClient("local", logs=False) as client:
        yield client


def run(client: FrayClient, fn: Any, *args: Any) -> None:
    client.submit(request(fn, *args, name=new("job"))).wait(timeout=LATE_S)


class Odd:
    """Actor for unusual cases."""

    def end(self) -> str:
        current_actor().terminate()
        return "this call is still answered"

    def fail(self) -> None:
        current_actor().fail("I am broken")

    def is_asked_to_end(self) -> bool:
        return bool(current_actor().shutdown_event.is_set())

    def client(self) -> str:
        return type(current_client()).__name__

    def leave(self) -> None:
        raise SystemExit(3)


# Jobs ----------------------------------------------------------------------------------------------------------------


def test_return_values_of_jobs_are_dropped_and_need_not_pickle(client: FrayClient) -> None:
    entrypoint = Entrypoint.from_callable(threading.Lock)
    assert client.submit(JobRequest(name=new("lock"), entrypoint=entrypoint)).wait(LATE_S) == JobStatus.SUCCEEDED


def test_a_living_job_is_adopted_even_if_the_request_differs(client: FrayClient, caplog: Any) -> None:
    go = threading.Event()
    gates[id(go)] = go
    name = new("held")
    first = client.submit(request(hold, id(go), name=name))
    second = client.submit(request(do_nothing, name=name))
    assert second.job_id == first.job_id
    assert "a different request" in caplog.text
    with pytest.raises(JobAlreadyExists) as raised:
        client.submit(request(do_nothing, name=name), adopt_existing=False)
    assert raised.value.handle == first
    go.set()
    assert wait_all([first, second], timeout=LATE_S) == [JobStatus.SUCCEEDED] * 2
    assert client.submit(request(do_nothing, name=name)).job_id != first.job_id, "an ended job's name is free"


gates: dict[int, threading.Event] = {}


def hold(number: int) -> None:
    gates[number].wait(LATE_S)


def test_a_job_handle_pickles_to_its_id(client: FrayClient, tmp_path: Path) -> None:
    job = client.submit(request(do_nothing))
    arrived = pickle.loads(pickle.dumps(job))
    assert arrived == job
    assert arrived.wait(LATE_S) == JobStatus.SUCCEEDED == arrived.status()
    run(client, look_at, job, tmp_path / "seen")
    assert (tmp_path / "seen").read_text() == "succeeded"
    job.terminate()
    assert pickle.loads(pickle.dumps(job)).status() == JobStatus.STOPPED


def look_at(job: Any, path: Path) -> None:
    write(path, job.wait(LATE_S))


def test_an_unknown_job_is_a_runtimeerror(client: FrayClient) -> None:
    job = pickle.loads(pickle.dumps(client.submit(request(do_nothing))))
    job._job_id = "never-there"
    with pytest.raises(RuntimeError, match="never-there"):
        job.status()


def test_a_missing_program_fails_only_its_job(client: FrayClient) -> None:
    job = client.submit(JobRequest(name=new("no"), entrypoint=Entrypoint.from_binary("/no/such/program")))
    with pytest.raises(RuntimeError) as raised:
        job.wait(LATE_S)
    assert "cannot start" in "".join(raised.value.__notes__)
    run(client, do_nothing)


# Actors --------------------------------------------------------------------------------------------------------------


def test_errors_of_constructors_arrive_as_themselves(client: FrayClient) -> None:
    broken = client.create_actor(Broken, name=new("broken"))
    for _ in range(2):
        with pytest.raises(Wrong, match=r"^not to be made \(3\)"):
            broken.add.remote(1).result(LATE_S)
    group = client.create_actor_group(Broken, name=new("broken"), count=2)
    with pytest.raises(Wrong, match=r"^not to be made \(3\)"):
        group.wait_ready(timeout=LATE_S)
    wait_until(group.is_done, "its end")


def test_a_group_that_has_ended_is_never_ready(client: FrayClient) -> None:
    group = client.create_actor_group(Counter, name=new("counter"), count=2)
    group.shutdown()
    with pytest.raises(RuntimeError, match="can never"):
        group.wait_ready(timeout=LATE_S)
    assert group.statuses() == [JobStatus.STOPPED] * 2
    assert group.is_done()
    assert (group.ready_count, group.discover_new()) == (0, [])


def test_wait_all_is_refused_in_a_trio_loop(client: FrayClient) -> None:
    go = threading.Event()
    gates[id(go)] = go
    job = client.submit(request(hold, id(go)))

    async def ask() -> None:
        with pytest.raises(BlockingNotAllowed, match="wait_all waits"):
            wait_all([job])

    trio.run(ask)
    go.set()
    assert wait_all([job], timeout=LATE_S) == [JobStatus.SUCCEEDED]


def test_ended_jobs_can_be_queried_after_shutdown() -> None:
    with FrayClient("local", logs=False) as client:
        well, badly = client.submit(request(do_nothing)), client.submit(request(fail))
    for _ in range(2):
        assert well.wait(timeout=LATE_S) == JobStatus.SUCCEEDED == well.status()
        with pytest.raises(Wrong, match="no such luck"):
            badly.wait()
    assert wait_all([well, badly], raise_on_failure=False) == [JobStatus.SUCCEEDED, JobStatus.FAILED]


def test_an_empty_group_is_ready_and_done(client: FrayClient, tmp_path: Path) -> None:
    group = client.create_actor_group(Counter, name=new("counter"), count=0)
    assert (group.wait_ready(timeout=0), group.discover_new(), group.jobs, group.statuses()) == ([], [], [], [])
    assert (group.ready_count, group.is_done()) == (0, True)
    run(client, use_group, group, tmp_path)
    group.shutdown()


def test_a_timeout_of_zero_or_less_polls_once(client: FrayClient) -> None:
    group = client.create_actor_group(Counter, name=new("counter"), count=1)
    (counter,) = group.wait_ready(timeout=LATE_S)
    job = client.submit(request(do_nothing))
    job.wait(timeout=LATE_S)
    for timeout in (0, -1, -math.inf):
        assert group.wait_ready(timeout=timeout) == [counter]
        assert job.wait(timeout=timeout) == JobStatus.SUCCEEDED
        assert wait_all([job], timeout=timeout) == [JobStatus.SUCCEEDED]
    answered = counter.add.remote(1)
    answered.result(math.inf)
    assert answered.result(timeout=-1) == 1
    group.shutdown()
    with pytest.raises(RuntimeError):
        group.wait_ready(timeout=-1)


def test_an_argument_may_be_called_self(client: FrayClient) -> None:
    keywords = client.create_actor(Keywords, name=new("keywords"))
    assert keywords.names(self=1, name=2) == ["name", "self"] == keywords.names.remote(self=1, name=2).result(LATE_S)


class Keywords:
    def names(*args: Any, **kwargs: Any) -> list[str]:
        return sorted(kwargs)


def test_a_handle_by_name_waits_for_its_actor(client: FrayClient) -> None:
    name = new("late")
    threading.Timer(0.1, lambda: client.create_actor(Counter, 5, name=name)).start()
    with set_current_client(client):
        assert FrayActorHandle(name).add(1) == 6


def test_old_handles_reach_the_next_actor_of_the_name(client: FrayClient) -> None:
    name = new("odd")
    odd = client.create_actor(Odd, name=name)
    assert odd.end() == "this call is still answered"
    wait_until(lambda: dies(odd.is_asked_to_end), "its end")
    client.create_actor(Odd, name=name)
    assert odd.is_asked_to_end() is False


def dies(call: Any) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


def test_an_actor_can_fail_itself(client: FrayClient) -> None:
    odd = client.create_actor(Odd, name=new("odd"))
    odd.fail.remote()
    wait_until(lambda: dies(odd.is_asked_to_end), "its end")


def test_systemexit_in_a_call_leaves_no_future_waiting(client: FrayClient) -> None:
    with pytest.raises(Exception, match="SystemExit"):
        client.create_actor(Odd, name=new("odd")).leave.remote().result(LATE_S)


def test_the_name_of_a_living_actor_is_refused(client: FrayClient) -> None:
    name = new("counter")
    client.create_actor(Counter, name=name)
    with pytest.raises(JobAlreadyExists) as raised:
        client.create_actor(Counter, name=name)
    assert "end the holder of the name" in raised.value.__notes__[0]


def test_a_hosted_actor_can_end_itself_and_is_current_in_its_constructor(client: FrayClient) -> None:
    hosted = client.host_actor(Odd, name=new("odd"))
    assert hosted.handle.is_asked_to_end() is False
    hosted.handle.end()
    wait_until(lambda: dies(hosted.handle.is_asked_to_end), "its end")
    with pytest.raises(ZeroDivisionError):
        client.host_actor(Divides, 0, name=new("divides"))


class Divides:
    def __init__(self, by: int) -> None:
        assert current_actor().group_name.startswith("divides")
        self.result = 1 / by


def test_sync_methods_run_on_max_concurrency_threads(client: FrayClient) -> None:
    meeting = client.create_actor(Meeting, 3, name=new("meeting"), actor_config=ActorConfig(max_concurrency=3))
    assert len({future.result(LATE_S) for future in [meeting.meet.remote() for _ in range(3)]}) == 3


class Meeting:
    def __init__(self, count: int) -> None:
        self._all = threading.Barrier(count)

    def meet(self) -> int:
        self._all.wait(LATE_S)
        return threading.get_ident()


# Clients -------------------------------------------------------------------------------------------------------------


def name_of_client(path: Path) -> None:
    write(path, f"{type(current_client()).__name__} {current_client() is current_client()}")


def test_the_client_in_a_job_is_its_own_despite_the_variable(
    client: FrayClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec in ("local", "machine", "fray://nowhere:1"):
        monkeypatch.setenv("FRAY_CLIENT_SPEC", spec)
        path = tmp_path / spec.partition(":")[0]
        run(client, name_of_client, path)
        assert path.read_text() == "FrayClient True"


def test_the_client_in_an_actor_is_that_of_its_cluster(client: FrayClient) -> None:
    assert client.create_actor(Odd, name=new("odd")).client() == "FrayClient"
    assert isinstance(current_client(), LocalClient), "outside it is another one"


def test_a_pickled_client_becomes_the_client_of_its_destination(client: FrayClient, tmp_path: Path) -> None:
    with set_current_client(client):
        assert pickle.loads(pickle.dumps(client)) is client
    run(client, submit_through, client, tmp_path / "done")
    assert (tmp_path / "done").exists()


def submit_through(client: FrayClient, path: Path) -> None:
    client.submit(request(write, path)).wait(LATE_S)


def test_a_client_around_an_open_cluster_leaves_it_open() -> None:
    with blocking.open_cluster("local", logs=False) as cluster:
        client = FrayClient(cluster=cluster)
        counter = client.create_actor(Counter, name="counter")
        job = client.submit(request(do_nothing))
        assert counter.add(1) == 1
        client.shutdown()
        assert job.status() == JobStatus.SUCCEEDED
        wait_until(lambda: dies(lambda: counter.add(1)), "the end of its actor")
        assert cluster.list_jobs()
    with pytest.raises(ValueError, match="that cluster as it is"):
        FrayClient("local", cluster=cluster)


def test_a_client_that_does_not_wait_ends_its_jobs() -> None:
    client = FrayClient("local", logs=False)
    job = client.submit(request(hold_for_ever))
    client.shutdown(wait=False)
    assert job.status() == JobStatus.STOPPED
    for ask in (lambda: client.submit(request(do_nothing)), lambda: client.create_actor(Counter, name="counter")):
        with pytest.raises(RuntimeError, match="shut down"):
            ask()


async def hold_for_ever() -> None:
    import trio

    await trio.sleep_forever()


def test_handles_of_a_closed_client_say_so() -> None:
    with FrayClient("local", logs=False) as client:
        counter = client.create_actor(Counter, name="counter")
        counter.add(1)
    with pytest.raises(RuntimeError, match="make another"):
        counter.add(1)


def test_unpickled_objects_without_a_cluster_raise_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    from fray.blocking.bridge import background_loop

    monkeypatch.setattr(background_loop, "opened", [])
    with pytest.raises(RuntimeError, match="set_current_client"):
        FrayActorHandle("counter").add(1)


def test_everything_works_where_asyncio_runs_in_the_thread(client: FrayClient) -> None:
    async def cell() -> int:
        counter = client.create_actor(Counter, name=new("counter"))
        client.submit(request(do_nothing)).wait(LATE_S)
        return int(counter.add.remote(1).result(LATE_S))

    assert asyncio.run(cell()) == 1


def test_all_operations_work_on_any_thread(client: FrayClient, tmp_path: Path) -> None:
    def use(index: int) -> None:
        counter = client.create_actor(Counter, name=new("counter"))
        client.submit(request(write, tmp_path / f"{index}", str(counter.add(index)))).wait(LATE_S)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE_S)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3"]
