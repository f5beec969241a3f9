"""`LocalClient` beyond the contract of all clients: threads, closures, shared objects."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import pytest
from v2_contract import LATE_S, SHORT_S, Counter, Wrong, new, program, request, wait_until

from fray import threads
from fray.v2 import (
    ActorConfig,
    ActorContext,
    ActorFuture,
    ActorGroup,
    ActorHandle,
    ActorMethod,
    Client,
    Entrypoint,
    EnvironmentConfig,
    JobHandle,
    JobRequest,
    JobStatus,
    LocalActorHandle,
    LocalActorMethod,
    LocalClient,
    LocalJobHandle,
    ResourceConfig,
    current_actor,
    current_client,
    set_current_client,
    wait_all,
)
from fray.v2.actor import _reset_current_actor, _set_current_actor


@pytest.fixture
def client() -> Iterator[LocalClient]:
    with LocalClient() as client:
        yield client


class Free:
    """Actor that calls the functions it gets."""

    def __init__(self, fn: Any = None) -> None:
        self.made = None if fn is None else fn()

    def call(self, /, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def give(self, what: Any) -> Any:
        return what


# Jobs ----------------------------------------------------------------------------------------------------------------


def test_infinity_means_no_timeout_and_nan_is_refused(client: LocalClient) -> None:
    assert client.submit(request(time.sleep, SHORT_S)).wait(timeout=math.inf) == JobStatus.SUCCEEDED
    free = client.create_actor(Free, name=new("free"))
    assert free.call.remote(time.sleep, SHORT_S).result(timeout=math.inf) is None
    assert free.call.remote(time.sleep, SHORT_S).result(timeout=1e12) is None
    with pytest.raises(ValueError, match="must be seconds"):
        wait_all([], timeout=math.nan)


def test_an_argument_may_be_called_self(client: LocalClient) -> None:
    free = client.create_actor(Free, name=new("free"))
    assert free.call(dict, self=1) == {"self": 1} == free.call.remote(dict, self=1).result(LATE_S)


def test_a_job_shares_a_closure_over_a_lock_with_its_submitter(client: LocalClient) -> None:
    lock, seen = threading.Lock(), []

    def note() -> None:
        with lock:
            seen.append(threading.current_thread() is threading.main_thread())

    client.submit(request(note)).wait(timeout=LATE_S)
    assert seen == [False]


def test_a_job_runs_in_a_copy_of_its_submitters_context(client: LocalClient) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[Any] = []

    def note() -> None:
        seen.extend((variable.get(), current_client()))
        variable.set("of the job")

    variable.set("of the submitter")
    with set_current_client(client):
        job = client.submit(request(note))
    variable.set("later")
    job.wait(timeout=LATE_S)
    assert seen == ["of the submitter", client]
    assert variable.get() == "later"


def test_queued_jobs_report_running_and_are_first_come_first_served() -> None:
    go, order = threading.Event(), []
    with LocalClient(max_threads=1) as client:
        first = client.submit(request(lambda: go.wait(LATE_S), name="first"))
        rest = [client.submit(request(order.append, index)) for index in range(10)]
        assert [job.status() for job in (first, *rest)] == [JobStatus.RUNNING] * 11
        go.set()
        wait_all([first, *rest], timeout=LATE_S)
    assert order == list(range(10))


def test_max_threads_jobs_run_concurrently() -> None:
    together = threading.Barrier(3)
    with LocalClient(max_threads=3) as client:
        wait_all([client.submit(request(together.wait, LATE_S)) for _ in range(6)], timeout=LATE_S)
    with pytest.raises(ValueError, match="max_threads=0"):
        LocalClient(max_threads=0)


def test_a_queued_job_that_is_terminated_never_starts_and_its_wait_ends_at_once() -> None:
    go, started = threading.Event(), []
    with LocalClient(max_threads=1) as client:
        first = client.submit(request(lambda: go.wait(LATE_S), name="first"))
        queued = client.submit(request(started.append, 1))
        queued.terminate()
        assert queued.wait() == JobStatus.STOPPED == queued.status()
        assert first.status() == JobStatus.RUNNING
        go.set()
        first.wait(timeout=LATE_S)
    assert started == []


def test_the_code_of_a_terminated_job_continues_and_wait_waits_for_it(client: LocalClient) -> None:
    began, go, ended = threading.Event(), threading.Event(), []

    def body() -> None:
        began.set()
        go.wait(LATE_S)
        ended.append(True)
        raise Wrong("after terminate", 1)

    job = client.submit(request(body))
    began.wait(LATE_S)
    job.terminate()
    assert job.wait(timeout=0.01, raise_on_failure=False) == JobStatus.STOPPED
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.01)
    go.set()
    assert job.wait(timeout=LATE_S) == JobStatus.STOPPED == job.status()
    assert ended == [True]


def test_one_name_twice_is_two_jobs(client: LocalClient) -> None:
    jobs = [client.submit(request(list, name="same"), adopt) for adopt in (True, False)]
    assert len({job.job_id for job in jobs}) == 2
    assert all("same" in job.job_id for job in jobs)


def test_environment_resources_replicas_and_retries_have_no_effect(client: LocalClient) -> None:
    runs: list[str] = []

    def body() -> None:
        runs.append(os.environ.get("FLAVOUR", "not set"))
        raise Wrong("once", 1)

    job = client.submit(
        JobRequest(
            name="much",
            entrypoint=Entrypoint.from_callable(body),
            resources=ResourceConfig.with_tpu("v5litepod-16", slice_count=2, preemptible=False),
            environment=EnvironmentConfig(docker_image="no/such:image", env_vars={"FLAVOUR": "sweet"}),
            max_retries_failure=5,
        )
    )
    assert job.wait(timeout=LATE_S, raise_on_failure=False) == JobStatus.FAILED
    assert runs == ["not set"]


def test_a_job_that_calls_sys_exit_0_has_succeeded(client: LocalClient) -> None:
    assert client.submit(request(sys.exit)).wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    with pytest.raises(SystemExit, match="not well"):
        client.submit(request(sys.exit, "not well")).wait(timeout=LATE_S)


def test_an_entrypoint_can_be_taken_from_a_request_and_called(client: LocalClient) -> None:
    seen: list[Any] = []
    given = [object()]
    entrypoint = Entrypoint.from_callable(
        lambda *args, **kwargs: seen.append((args, kwargs)), args=[given], kwargs={"x": given}
    )
    client.submit(JobRequest(name="same-objects", entrypoint=entrypoint)).wait(timeout=LATE_S)
    assert seen[0][0][0] is given is seen[0][1]["x"]


def test_callers_can_build_handles_from_futures() -> None:
    future: Future[int] = Future()
    job = LocalJobHandle("mine-1", future)
    assert (job.job_id, job.status(), job.logs()) == ("mine-1", JobStatus.RUNNING, "")
    with pytest.raises(TimeoutError, match="mine-1"):
        job.wait(timeout=0.01)
    future.set_result(1)
    assert job.wait() == JobStatus.SUCCEEDED == wait_all([job])[0]
    failed: Future[int] = Future()
    failed.set_exception(Wrong("bad", 1))
    with pytest.raises(Wrong):
        LocalJobHandle("mine-2", failed).wait()
    pending = LocalJobHandle("mine-3", Future())
    pending.terminate()
    assert pending.wait() == JobStatus.STOPPED


def test_a_job_that_raises_timeouterror_has_failed(client: LocalClient) -> None:
    def body() -> None:
        raise TimeoutError("of the job")

    job = client.submit(request(body))
    with pytest.raises(TimeoutError, match=r"^of the job$"):
        job.wait(timeout=LATE_S)
    assert job.wait(timeout=0, raise_on_failure=False) == JobStatus.FAILED


# Programs ------------------------------------------------------------------------------------------------------------


def test_the_output_of_a_program_is_logged_and_can_be_read_while_it_runs(
    client: LocalClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fray.v2")
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    job = client.submit(program("sh", "-c", rf"echo first; echo second >&2; printf '\377\n'; {wait}"))
    wait_until(lambda: job.logs() == "first\nsecond\n\ufffd\n", "its output")
    (tmp_path / "go").touch()
    job.wait(timeout=LATE_S)
    assert f"{job.job_id}: first" in caplog.messages


def test_a_program_that_fails_raises_with_its_code_and_its_output(client: LocalClient) -> None:
    job = client.submit(program("sh", "-c", "echo why; exit 3"))
    with pytest.raises(subprocess.CalledProcessError) as raised:
        job.wait(timeout=LATE_S)
    assert (raised.value.returncode, raised.value.output) == (3, "why\n")
    with pytest.raises(FileNotFoundError):
        client.submit(program("no-such-program-anywhere")).wait(timeout=LATE_S)


def test_a_terminated_program_ends_with_its_children(client: LocalClient) -> None:
    job = client.submit(program("sh", "-c", "sleep 1000 & echo $!; wait"))
    child = int(wait_until(job.logs, "its child"))
    job.terminate()
    assert job.status() == JobStatus.STOPPED == job.wait(timeout=LATE_S)
    wait_until(lambda: not alive(child), "the end of its child")


def test_children_of_an_ended_program_are_killed(client: LocalClient) -> None:
    job = client.submit(program("sh", "-c", "sleep 1000 & echo $!"))
    began = time.monotonic()
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert time.monotonic() - began < 5
    wait_until(lambda: not alive(int(job.logs())), "the end of its child")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# Calls ---------------------------------------------------------------------------------------------------------------


def test_every_call_has_its_own_thread_at_once_despite_max_concurrency() -> None:
    together = threading.Barrier(24)
    with LocalClient(max_threads=1) as client:
        free = client.create_actor(Free, name=new("free"), actor_config=ActorConfig(max_concurrency=1))
        calls = [free.call.remote(together.wait, LATE_S) for _ in range(24)]
        assert sorted(call.result(timeout=LATE_S) for call in calls) == list(range(24))


def test_actor_calls_never_take_a_jobs_thread() -> None:
    together = threading.Barrier(3)
    with LocalClient(max_threads=1) as client:
        free = client.create_actor(Free, name=new("free"))
        job = client.submit(request(together.wait, LATE_S))
        calls = [free.call.remote(together.wait, LATE_S) for _ in range(2)]
        wait_all([job], timeout=LATE_S)
        assert all(call.result(timeout=LATE_S) in range(3) for call in calls)


def test_ten_threads_on_one_unprotected_counter_end_at_ten(client: LocalClient) -> None:
    counter = client.create_actor(Counter, name=new("counter"))
    threads = [threading.Thread(target=lambda: counter.add.remote(1).result(timeout=LATE_S)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.add(0) == 10


def test_arguments_results_and_errors_are_the_same_objects(client: LocalClient) -> None:
    free = client.create_actor(Free, name=new("free"))
    group = client.create_actor_group(Free, name=new("group"), count=2)
    for thing in ([1], threading.Lock(), group, lambda: None):
        assert free.give.remote(thing).result() is thing is free.give(thing)
    error = Wrong("holds a lock", 1)
    error.lock = threading.Lock()  # type: ignore[attr-defined]

    def fail() -> None:
        raise error

    with pytest.raises(Wrong) as raised:
        free.call.remote(fail).result()
    assert raised.value is error


def test_only_the_error_of_a_failed_call_references_its_arguments(client: LocalClient) -> None:
    class Large:
        pass

    def fail(thing: Large) -> None:
        raise Wrong("with a traceback", 1)

    free = client.create_actor(Free, name=new("free"))
    gc.collect()
    gc.disable()
    try:
        for begin in (lambda thing: free.call.remote(fail, thing), lambda thing: client.submit(request(fail, thing))):
            held = weakref.ref(thing := Large())
            job = begin(thing)
            try:
                job.result() if isinstance(job, Future) else job.wait()
            except Wrong:
                del thing, job
            wait_until(lambda held=held: held() is None, "the end of its argument")
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()])
def test_base_exceptions_complete_the_future(client: LocalClient, error: BaseException) -> None:
    def leave() -> None:
        raise error

    free = client.create_actor(Free, name=new("free"))
    with pytest.raises(type(error)):
        free.call.remote(leave).result(timeout=LATE_S)
    assert free.give(1) == 1


def test_unknown_private_and_plain_attributes_are_attributeerrors_at_access(client: LocalClient) -> None:
    class Odd:
        plain = 3

        def __init__(self) -> None:
            self.own = lambda: "a callable of the instance"

        @property
        def computed(self) -> int:
            return 4

    odd = client.create_actor(Odd, name=new("odd"))
    for name in ("nothing", "plain", "computed", "_own", "__len__"):
        with pytest.raises(AttributeError, match=name) as raised:
            getattr(odd, name)
        assert [Path(entry.path).name for entry in raised.traceback] == [Path(__file__).name]
    assert odd.own() == "a callable of the instance"


def test_handles_are_names(client: LocalClient) -> None:
    counter = client.create_actor(Counter, name=(name := new("counter")))
    for same in (pickle.loads(pickle.dumps(counter)), copy.deepcopy(counter), copy.copy(counter)):
        assert same == counter
        assert hash(same) == hash(counter)
        assert same.add(1)
    assert repr(counter) == f"LocalActorHandle({name!r})"


def test_all_parts_implement_the_protocols(client: LocalClient) -> None:
    counter = client.create_actor(Counter, name=new("counter"))
    assert isinstance(client, Client)
    assert isinstance(client.submit(request(list)), JobHandle)
    assert isinstance(counter, ActorHandle)
    assert isinstance(counter, LocalActorHandle)
    assert isinstance(counter.add, ActorMethod)
    assert isinstance(counter.add, LocalActorMethod)
    assert isinstance(counter.add.remote(1), ActorFuture)
    assert isinstance(client.create_actor_group(Counter, name=new("group"), count=1), ActorGroup)


# Names ---------------------------------------------------------------------------------------------------------------


def test_a_name_can_be_reused_at_once_and_old_handles_reach_the_later_actor(client: LocalClient) -> None:
    name = new("counter")
    first = client.create_actor(Counter, 100, name=name)
    assert first.add(0) == 100
    second = LocalClient().create_actor(Counter, 200, name=name)
    assert [first.add(0), second.add(0)] == [200, 200], "names belong to the process"


def test_the_end_of_the_earlier_actor_of_a_name_does_not_end_the_later(client: LocalClient) -> None:
    name = new("counter")
    hosted = client.host_actor(Counter, 100, name=name)
    later = client.create_actor(Counter, 200, name=name)
    hosted.shutdown()
    assert later.add(0) == 200


def test_actors_outlive_their_client() -> None:
    with LocalClient() as client:
        counter = client.create_actor(Counter, name=new("counter"))
    assert counter.add(1) == 1


def test_a_handle_without_actor_raises_runtimeerror_until_the_actor_exists(client: LocalClient) -> None:
    handle = LocalActorHandle(name := new("late"))
    with pytest.raises(RuntimeError, match=name):
        _ = handle.add
    client.create_actor(Counter, name=name)
    assert handle.add(1) == 1


# Constructors --------------------------------------------------------------------------------------------------------


def test_members_are_constructed_one_after_another_by_the_caller(client: LocalClient) -> None:
    made: list[Any] = []
    note = lambda: made.append((current_actor().index, threading.current_thread()))  # noqa: E731
    client.create_actor_group(Free, note, name=new("group"), count=3)
    assert made == [(index, threading.main_thread()) for index in range(3)]


def test_an_error_of_a_constructor_is_raised_and_ends_the_members_before(client: LocalClient) -> None:
    name, error = new("group"), Wrong("the second", 2)

    def second_fails() -> None:
        if current_actor().index == 1:
            raise error

    with pytest.raises(Wrong) as raised:
        client.create_actor_group(Free, second_fails, name=name, count=3)
    assert raised.value is error
    with pytest.raises(RuntimeError):
        _ = LocalActorHandle(f"{name}-0").give


def test_an_actor_that_cannot_be_made_does_not_replace_the_one_before(client: LocalClient) -> None:
    def fail() -> None:
        raise Wrong("no", 1)

    before = client.create_actor(Counter, 5, name=(name := new("counter")))
    with pytest.raises(Wrong):
        client.create_actor(Free, fail, name=name)
    assert before.add(0) == 5


def test_constructors_call_other_actors_and_wait_while_their_group_is_being_made(client: LocalClient) -> None:
    counter = client.create_actor(Counter, name=new("counter"))
    name = new("group")

    def register() -> tuple[int, Any]:
        index = current_actor().index
        earlier = [LocalActorHandle(f"{name}-{i}").give.remote(i).result(timeout=LATE_S) for i in range(index)]
        return counter.add.remote(1).result(timeout=LATE_S), earlier

    made: list[Any] = []
    client.create_actor_group(Free, lambda: made.append(register()), name=name, count=3)
    assert made == [(1, []), (2, [0]), (3, [0, 1])]


def test_a_constructor_can_pass_on_its_handle_and_calls_wait_for_its_end(client: LocalClient) -> None:
    registrar = client.create_actor(Free, name=new("registrar"))
    calls: list[Any] = []

    def register() -> str:
        me = current_actor().handle
        registrar.call.remote(lambda: calls.append(me.give.remote("called back"))).result(timeout=LATE_S)
        with pytest.raises(RuntimeError, match="still being made"):
            me.give("waits for itself")
        return "made"

    member = client.create_actor(Free, register, name=new("member"))
    assert calls[0].result(timeout=LATE_S) == "called back"
    assert member.call(lambda: "answers") == "answers"


def test_a_call_during_a_failing_constructor_raises(client: LocalClient) -> None:
    calls: list[Any] = []

    def call_and_fail() -> None:
        calls.append(current_actor().handle.give.remote(1))
        raise Wrong("no", 1)

    with pytest.raises(Wrong):
        client.create_actor(Free, call_and_fail, name=new("broken"))
    with pytest.raises(RuntimeError, match="not there"):
        calls[0].result(timeout=LATE_S)


# Groups --------------------------------------------------------------------------------------------------------------


def test_a_group_reports_the_end_of_each_member(client: LocalClient) -> None:
    group = client.create_actor_group(Free, name=(name := new("group")), count=3)
    assert [job.job_id for job in group.jobs] == [f"{name}-{index}" for index in range(3)]
    group.jobs[1].terminate()
    assert group.statuses() == [JobStatus.RUNNING, JobStatus.STOPPED, JobStatus.RUNNING]
    assert (group.ready_count, group.is_done(), len(group.wait_ready(count=2))) == (2, False, 2)
    with pytest.raises(RuntimeError, match="never"):
        group.wait_ready()
    group.shutdown()
    assert (group.ready_count, group.is_done(), group.discover_new()) == (0, True, [])
    assert wait_all(group.jobs, raise_on_failure=False) == [JobStatus.STOPPED] * 3
    assert [job.wait(timeout=LATE_S) for job in group.jobs] == [JobStatus.STOPPED] * 3


def test_waiting_for_more_members_than_exist_raises(client: LocalClient) -> None:
    group = client.create_actor_group(Free, name=new("group"), count=2)
    with pytest.raises(TimeoutError, match="there are 2"):
        group.wait_ready(count=3)
    assert client.create_actor_group(Free, name=new("none"), count=0).wait_ready() == []
    with pytest.raises(ValueError, match="count=-1"):
        client.create_actor_group(Free, name=new("none"), count=-1)


def test_discover_new_returns_nothing_after_wait_ready(client: LocalClient) -> None:
    group = client.create_actor_group(Free, name=new("group"), count=3)
    given = group.wait_ready(count=2)
    assert len(given) == 2
    assert [handle not in given for handle in group.discover_new()] == [True]
    assert group.discover_new() == []


# Current actor -----------------------------------------------------------------------------------------------------


def test_an_actor_is_current_in_direct_and_remote_calls_and_in_copied_contexts(client: LocalClient) -> None:
    group = client.create_actor_group(Free, name=(name := new("group")), count=2)
    me = group.wait_ready()[1]
    about = lambda: (current_actor().index, current_actor().group_name, current_actor().handle)  # noqa: E731
    assert me.call(about) == (1, name, me) == me.call.remote(about).result(timeout=LATE_S)

    def in_a_thread() -> Any:
        seen: list[Any] = []
        thread = threading.Thread(target=copy_context().run, args=(lambda: seen.append(about()),))
        thread.start()
        thread.join()
        return seen[0]

    assert me.call(in_a_thread) == (1, name, me)
    with pytest.raises(RuntimeError):
        current_actor()


def test_a_job_submitted_by_an_actor_has_no_current_actor(client: LocalClient) -> None:
    free = client.create_actor(Free, name=new("free"))
    job = free.call(client.submit, request(current_actor))
    with pytest.raises(RuntimeError, match="current_actor"):
        job.wait(timeout=LATE_S)


def test_an_actor_can_end_itself_as_succeeded_or_failed(client: LocalClient) -> None:
    group = client.create_actor_group(Free, name=new("group"), count=2)
    well, badly = group.wait_ready()
    assert not well.call(lambda: current_actor().shutdown_event.is_set())
    well.call(lambda: current_actor().terminate())
    badly.call(lambda: current_actor().fail("no more of this"))
    assert group.statuses() == [JobStatus.SUCCEEDED, JobStatus.FAILED]
    with pytest.raises(RuntimeError, match="no more of this"):
        group.jobs[1].wait(timeout=LATE_S)
    for handle in (well, badly):
        with pytest.raises(RuntimeError, match="not there"):
            _ = handle.give


def test_a_context_can_be_made_by_hand() -> None:
    about = ActorContext(handle="mine", index=3, group_name="by-hand")
    token = _set_current_actor(about)
    try:
        assert current_actor() is about
    finally:
        _reset_current_actor(token)
    assert (about.handle, about.index, about.group_name) == ("mine", 3, "by-hand")
    assert not about.shutdown_event.is_set()
    about.terminate()
    assert about.shutdown_event.is_set()
    other = ActorContext("mine", 0, "by-hand")
    other.fail("why not")
    assert other.shutdown_event.is_set()


# The client ----------------------------------------------------------------------------------------------------------


def test_shutdown_waits_for_running_jobs_by_default() -> None:
    go, ended = threading.Event(), []
    client = LocalClient()
    client.submit(request(lambda: (go.wait(LATE_S), ended.append(True)), name="slow"))
    client.shutdown(wait=False)
    assert ended == []
    threading.Timer(0.05, go.set).start()
    client.shutdown()
    assert ended == [True]


def test_no_job_is_lost_when_many_threads_submit() -> None:
    done: list[int] = []
    client = LocalClient(max_threads=2)
    threads = [
        threading.Thread(target=lambda: [client.submit(request(done.append, 1)) for _ in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.shutdown()
    assert len(done) == 400


def test_a_job_without_a_thread_is_refused_and_takes_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LocalClient(max_threads=1) as client:
        with monkeypatch.context() as patched:
            patched.setattr(threads, "_start", no_thread)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    client.submit(request(time.sleep, 0))
        assert client.submit(request(time.sleep, 0)).wait(LATE_S) == JobStatus.SUCCEEDED


def no_thread(call: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_wait_all_accepts_an_iterator(client: LocalClient) -> None:
    jobs = (client.submit(request(time.sleep, SHORT_S)) for _ in range(3))
    assert wait_all(jobs, timeout=LATE_S) == [JobStatus.SUCCEEDED] * 3


def test_a_job_that_would_wait_for_itself_raises(client: LocalClient) -> None:
    with pytest.raises(RuntimeError, match=r"shutdown\(wait=False\)"):
        client.submit(request(client.shutdown)).wait(timeout=LATE_S)
    client.submit(request(lambda: client.shutdown(wait=False), name="may")).wait(timeout=LATE_S)


def test_a_with_block_that_raises_does_not_wait_for_jobs() -> None:
    go = threading.Event()
    with pytest.raises(Wrong), LocalClient() as client:
        client.submit(request(lambda: go.wait(LATE_S), name="slow"))
        raise Wrong("out of here", 1)
    go.set()


def test_attributes_of_a_client_can_be_reassigned(client: LocalClient) -> None:
    submitted: list[str] = []
    original = client.submit
    client.submit = lambda job, *args: (submitted.append(job.name), original(job, *args))[1]  # type: ignore[method-assign]
    client.submit(request(list, name="seen")).wait(timeout=LATE_S)
    assert submitted == ["seen"]


def test_no_thread_is_left_two_seconds_after_many_threads_share_a_client() -> None:
    before = set(threading.enumerate())
    client = LocalClient()

    def run() -> None:
        group = client.create_actor_group(Counter, name=new("worker"), count=4)
        calls = [worker.add.remote(1) for worker in group.wait_ready() for _ in range(5)]
        assert sum(call.result(timeout=LATE_S) > 0 for call in calls) == 20
        group.shutdown()

    wait_all([client.submit(request(run)) for _ in range(6)], timeout=LATE_S)
    ended = time.monotonic()
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its threads")
    assert time.monotonic() - ended < 2


# Exit and fork -------------------------------------------------------------------------------------------------------

NEVER_ENDING = """
import os, sys, threading, time
from fray.v2 import Entrypoint, JobRequest, LocalClient

class Actor:
    def wait(self):
        threading.Event().wait()

client = LocalClient(max_threads=3)
for index in range(5):
    client.submit(JobRequest(name="never", entrypoint=Entrypoint.from_callable(threading.Event().wait)))
LocalClient().create_actor(Actor, name="actor").wait.remote()
program = LocalClient().submit(JobRequest(name="program", entrypoint=Entrypoint.from_binary(
    "sh", ["-c", "trap '' TERM; sleep 1000 & echo $$ $!; wait; wait"])))
while not program.logs():
    time.sleep(0.01)
print(program.logs(), end="", flush=True)
"""


def test_the_interpreter_exits_despite_endless_jobs_and_ends_programs() -> None:
    began = time.monotonic()
    done = python(NEVER_ENDING)
    assert time.monotonic() - began < 10
    pids = [int(pid) for pid in done.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of its program")


FORKS = """
import os, sys, threading
from fray.v2 import Entrypoint, JobRequest, LocalClient

class Actor:
    def pid(self):
        return os.getpid()

    def wait(self, go):
        return go.wait()

def job(fn):
    return JobRequest(name="job", entrypoint=Entrypoint.from_callable(fn))

client = LocalClient(max_threads=1)
go = threading.Event()
running, queued = client.submit(job(go.wait)), client.submit(job(go.wait))
actor = client.create_actor(Actor, name="actor")
assert actor.pid.remote().result() == os.getpid()
pending = actor.wait.remote(go)
if os.fork() == 0:
    for ask in (running.status, queued.wait, lambda: actor.pid, pending.result, lambda: pending.result(5)):
        try:
            ask()
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError(ask)
    assert client.create_actor(Actor, name="actor").pid.remote().result() == os.getpid()
    done = []
    client.submit(job(lambda: done.append(1))).wait(timeout=20)
    assert done == [1]
    print("child", flush=True)
    os._exit(0)
assert os.wait()[1] == 0
go.set()
assert queued.wait(timeout=20) == "succeeded" == running.status()
print("parent")
"""


def test_a_forked_child_gets_errors_for_old_objects_and_can_make_new_ones() -> None:
    assert python(FORKS).split() == ["child", "parent"]


def python(script: str) -> str:
    # From Python 3.12 on, os.fork() warns in a process that has threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
