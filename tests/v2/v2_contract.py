"""Contract of every client of `fray.v2`, as a suite that runs on each of them.

A backend's file has ``from v2_contract import *  # noqa: F403`` and defines three fixtures:

- ``client``: the client to test. It may be shared by all tests of a module; each test makes new names.
- ``make_client``: a function that returns a client which a test may shut down.
- ``capabilities``: a `Capabilities`, the only permitted differences between clients.

Functions of jobs and classes of actors are at the top of this module, so that every pickler finds them; processes on
this host meet in the files of ``tmp_path``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest

from fray.errors import ActorUnavailableError
from fray.v2 import (
    ActorConfig,
    Entrypoint,
    JobAlreadyExists,
    JobFailed,
    JobRequest,
    JobStatus,
    ResourceConfig,
    create_environment,
    current_actor,
    current_client,
    set_current_client,
    wait_all,
)

LATE_S = 60.0
"""Seconds that no operation takes on any client, unless it hangs."""
SHORT_S = 0.2
"""Timeout of waits that are meant to expire."""
SMALL = ResourceConfig(cpu=0.1, ram="256m")


@dataclass(frozen=True)
class Capabilities:
    """Permitted differences between clients."""

    adopts_names: bool = True
    """A second living job of a name is the first, or `JobAlreadyExists`; else it is a separate job."""
    kills_jobs: bool = True
    """`terminate` ends the code of a job; else the code continues."""
    logs_of_functions: bool = True
    """`JobHandle.logs` has what a function printed; else its output goes where the caller's goes."""
    logs_of_programs: bool = True
    own_variables: bool = True
    """A job has the variables of its environment; else those of this process."""
    carries_errors: bool = True
    """`JobHandle.wait` raises the job's own exception; else `JobFailed`, with its text as a note."""
    retries: bool = True
    """Jobs restart up to ``max_retries_failure`` times; else they run once."""
    finishes_calls: bool = True
    """`ActorGroup.shutdown` lets running calls finish; else they end with it."""
    runs_async: bool = False
    """Async functions and methods run, on Trio; else they are refused."""
    program_error: type[BaseException] = CalledProcessError
    """Error that `JobHandle.wait` raises for a program with an exit code other than 0."""


# Functions of jobs, and actors ---------------------------------------------------------------------------------------


class Wrong(ValueError):
    """Error class of a caller, with attributes besides its text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[0]} ({self.code})"


def wait_for_file(path: Path | str) -> None:
    until = time.monotonic() + LATE_S
    while not Path(path).exists():
        if time.monotonic() > until:
            raise AssertionError(f"{path} has not appeared")
        time.sleep(0.005)


def wait_until(holds: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + LATE_S
    while not (found := holds()):
        assert time.monotonic() < until, f"not within {LATE_S:g} s: {what}"
        time.sleep(0.01)
    return found


def write(path: Path, text: str = "done") -> None:
    """Write a file atomically, as other processes wait for it."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    part.write_text(text)
    part.rename(path)


async def write_async(path: Path) -> None:
    write(path)


def do_nothing() -> None:
    pass


def fail(code: int = 7) -> None:
    raise Wrong("no such luck", code)


def say(text: str) -> None:
    print(text, flush=True)


def write_when(go: Path, path: Path) -> None:
    wait_for_file(go)
    write(path)


def begin_and_wait(began: Path, go: Path) -> None:
    write(began)
    wait_for_file(go)


def fail_once(mark: Path) -> None:
    if not mark.exists():
        write(mark)
        fail()


def write_variable(name: str, path: Path) -> None:
    write(path, os.environ.get(name, "not set"))


def coordinate(directory: Path, count: int) -> None:
    """Submit jobs and wait for them; a job."""
    client = current_client()
    jobs = [client.submit(request(write, directory / f"part-{index}", f"{index}")) for index in range(count)]
    assert wait_all(jobs, timeout=LATE_S) == [JobStatus.SUCCEEDED] * count
    write(directory / "coordinator", type(client).__name__)


def add_to(counter: Any, k: int, path: Path | None = None) -> None:
    total = counter.add(k)
    if path is not None:
        write(path, str(total))


def work_for(coordinator: Any, index: int) -> None:
    coordinator.report.remote(index).result(timeout=LATE_S)


def host_and_coordinate(directory: Path, count: int) -> None:
    """Host an actor, which jobs of this job call; a job."""
    client = current_client()
    with client.host_actor(Counter, name=new("hosted")) as hosted:
        jobs = [client.submit(request(add_to, hosted.handle, 1)) for _ in range(count)]
        wait_all(jobs, timeout=LATE_S)
        write(directory / "total", str(hosted.handle.add(0)))


def work_with_actors(directory: Path) -> None:
    """Make actors; a job."""
    counter = current_client().create_actor(Counter, 100, name=new("total"), resources=SMALL)
    write(directory / "total", str(counter.add(Manager().add_up(2))))


def use_group(group: Any, directory: Path) -> None:
    members = group.wait_ready(timeout=LATE_S)
    write(directory / "indices", ",".join(str(member.index()) for member in members))


def try_unknown(handle: Any, path: Path) -> None:
    try:
        handle.no_such_method.remote().result(timeout=LATE_S)
    except AttributeError:
        write(path, "AttributeError")


class Counter:
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.n, self.step = start, step

    def add(self, k: int = 1) -> int:
        self.n += k * self.step
        return self.n

    def fail(self, text: str, code: int) -> None:
        raise Wrong(text, code)

    def wait_for(self, path: Path) -> str:
        wait_for_file(path)
        return "came"

    def begin_and_wait_for(self, began: Path, path: Path) -> str:
        write(began)
        return self.wait_for(path)

    def write(self, path: Path) -> None:
        write(path)

    def pid(self) -> int:
        return os.getpid()

    def add_elsewhere(self, other: Any, k: int) -> int:
        return int(other.add(k))

    def _secret(self) -> int:
        return self.n


class Async:
    async def add(self, k: int) -> int:
        return k


class Broken:
    def __init__(self) -> None:
        raise Wrong("not to be made", 3)

    def add(self, k: int) -> int:
        return k


class Ending:
    """Actor that ends itself."""

    def __init__(self) -> None:
        self._about = current_actor()

    def add(self, k: int) -> int:
        return k

    def end(self) -> None:
        self._about.shutdown_event.set()

    def give_up(self) -> None:
        self._about.fail(Wrong("no more of this", 7))

    def variable(self, name: str) -> str:
        return os.environ.get(name, "not set")


class Coordinator:
    """Actor that is in one call for the whole run, while workers call it."""

    def __init__(self) -> None:
        self._reports: list[int] = []
        self._changed = threading.Condition()

    def run(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._reports) >= count, LATE_S)
            return sorted(self._reports)

    def report(self, index: int) -> None:
        with self._changed:
            self._reports.append(index)
            self._changed.notify_all()


class Manager:
    """Actor that makes a group of workers, lets them work, and ends them."""

    def add_up(self, count: int) -> int:
        group = current_client().create_actor_group(Counter, name=new("worker"), count=count, resources=SMALL)
        try:
            workers = group.wait_ready(timeout=LATE_S)
            return sum(answers([worker.add.remote(index) for index, worker in enumerate(workers, 1)]))
        finally:
            group.shutdown()


class Member:
    """Actor that reads its own context in its constructor."""

    def __init__(self, directory: Path | None = None) -> None:
        me = current_actor()
        self._made_as = (me.index, me.group_name)
        self._handle, self._directory = me.handle, directory

    def index(self) -> int:
        return self._made_as[0]

    def made_as(self) -> tuple[int, str]:
        return self._made_as

    def now(self) -> tuple[int, str]:
        return current_actor().index, current_actor().group_name

    def handle(self) -> Any:
        return self._handle

    def shutdown(self) -> str:
        if self._directory is not None:
            write(self._directory / f"shutdown-{self.index()}")
        return "an ordinary method"


def new(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def request(fn: Callable[..., None], *args: Any, name: str = "", **settings: Any) -> JobRequest:
    entrypoint = Entrypoint.from_callable(fn, args)
    return JobRequest(name=name or new(fn.__name__.strip("<>")), entrypoint=entrypoint, resources=SMALL, **settings)


def program(*argv: str) -> JobRequest:
    return JobRequest(name=new("program"), entrypoint=Entrypoint.from_binary(argv[0], argv[1:]), resources=SMALL)


def assert_dead(handle: Any) -> None:
    with pytest.raises(ActorUnavailableError) as raised:
        handle.add.remote(1).result(timeout=LATE_S)
    assert not isinstance(raised.value, KeyError | ValueError | TypeError | AttributeError)


def answers(futures: Sequence[Any]) -> list[Any]:
    return [future.result(timeout=LATE_S) for future in futures]


# Jobs ----------------------------------------------------------------------------------------------------------------


def test_a_job_runs_with_its_arguments_and_succeeds(client: Any, tmp_path: Path) -> None:
    entrypoint = Entrypoint.from_callable(write, args=[tmp_path / "file"], kwargs={"text": "hello"})
    name = new("hello")
    job = client.submit(JobRequest(name=name, entrypoint=entrypoint, resources=SMALL))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED == job.status() == "succeeded"
    assert (tmp_path / "file").read_text() == "hello"
    assert name in job.job_id


def test_a_closure_can_be_a_job(client: Any, tmp_path: Path) -> None:
    text = "from around"
    client.submit(request(lambda: write(tmp_path / "file", text), name=new("lambda"))).wait(timeout=LATE_S)
    assert (tmp_path / "file").read_text() == text


def test_async_functions_run_or_are_refused(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    actor = client.create_actor(Async, name=new("async"), resources=SMALL)
    if capabilities.runs_async:
        client.submit(request(write_async, tmp_path / "file")).wait(timeout=LATE_S)
        assert (tmp_path / "file").read_text() == "done"
        assert actor.add.remote(3).result(timeout=LATE_S) == 3
        return
    with pytest.raises(ValueError, match="is async, and there is no loop"):
        client.submit(request(write_async, tmp_path / "file"))
    with pytest.raises(ValueError, match=r"method 'add'.* is async"):
        actor.add.remote(3).result(timeout=LATE_S)


def test_submit_returns_before_the_job_ends(client: Any, tmp_path: Path) -> None:
    job = client.submit(request(write_when, tmp_path / "go", tmp_path / "file"))
    assert job.status() in (JobStatus.PENDING, JobStatus.RUNNING)
    assert not JobStatus.finished(job.status())
    write(tmp_path / "go")
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED


def test_every_wait_raises_the_jobs_own_exception(client: Any, capabilities: Capabilities) -> None:
    job = client.submit(request(fail))
    if not capabilities.carries_errors:
        with pytest.raises(JobFailed) as caught:
            job.wait(timeout=LATE_S)
        assert "no such luck (7)" in caught.value.__notes__[0]
        return
    for _ in range(2):
        with pytest.raises(Wrong, match=r"^no such luck \(7\)$") as raised:
            job.wait(timeout=LATE_S)
        assert raised.value.code == 7
    assert job.status() == JobStatus.FAILED


def test_wait_without_raising_returns_failed(client: Any) -> None:
    job = client.submit(request(fail))
    assert job.wait(timeout=LATE_S, raise_on_failure=False) == JobStatus.FAILED


def test_a_wait_that_expires_raises_timeouterror_or_returns_the_status(client: Any, tmp_path: Path) -> None:
    job = client.submit(request(begin_and_wait, tmp_path / "began", tmp_path / "go"))
    wait_for_file(tmp_path / "began")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            job.wait(timeout=SHORT_S)
    assert job.wait(timeout=SHORT_S, raise_on_failure=False) == JobStatus.RUNNING
    write(tmp_path / "go")
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED


def test_terminate_returns_at_once_and_stopped_is_final(
    client: Any, tmp_path: Path, capabilities: Capabilities
) -> None:
    job = client.submit(request(begin_and_wait, tmp_path / "began", tmp_path / "go"))
    wait_for_file(tmp_path / "began")
    began = time.monotonic()
    for _ in range(3):
        job.terminate()
        assert job.status() == JobStatus.STOPPED
    assert time.monotonic() - began < 2.0
    if not capabilities.kills_jobs:
        write(tmp_path / "go")
    assert job.wait(timeout=LATE_S, raise_on_failure=False) == JobStatus.STOPPED == job.status()
    write(tmp_path / "go")  # a job of the local cluster has ended, but its thread still waits


def test_terminate_after_success_is_stopped(client: Any) -> None:
    job = client.submit(request(do_nothing))
    job.wait(timeout=LATE_S)
    job.terminate()
    assert job.status() == JobStatus.STOPPED == job.wait(timeout=LATE_S, raise_on_failure=False)


def test_wait_all_returns_at_once_after_terminate(client: Any, tmp_path: Path) -> None:
    done = client.submit(request(do_nothing))
    waits = [client.submit(request(begin_and_wait, tmp_path / f"began-{n}", tmp_path / "go")) for n in range(2)]
    done.wait(timeout=LATE_S)
    wait_for_file(tmp_path / "began-0")
    for job in waits:
        job.terminate()
    began = time.monotonic()
    found = wait_all([done, *waits], raise_on_failure=False)
    assert found == [JobStatus.SUCCEEDED, JobStatus.STOPPED, JobStatus.STOPPED]
    # The functions wait for "go" for LATE_S.
    assert time.monotonic() - began < LATE_S / 2
    write(tmp_path / "go")


def test_a_jobs_logs_are_text(client: Any, capabilities: Capabilities) -> None:
    job = client.submit(request(say, "output of the job"))
    job.wait(timeout=LATE_S)
    assert isinstance(job.logs(), str)
    if capabilities.logs_of_functions:
        wait_until(lambda: "output of the job" in job.logs(), "its logs")


def test_the_last_lines_of_the_logs_are_a_tuple(client: Any, capabilities: Capabilities) -> None:
    job = client.submit(program("sh", "-c", "echo one; echo two"))
    job.wait(timeout=LATE_S)
    wait_until(lambda: "two" in job.logs(), "its logs")
    assert job.logs(1) == ("two",)
    assert job.logs(0)[-2:] == ("one", "two")


def test_a_coordinator_job_submits_jobs_and_waits_for_them(client: Any, tmp_path: Path) -> None:
    with set_current_client(client):
        job = client.submit(request(coordinate, tmp_path, 3))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert [(tmp_path / f"part-{index}").read_text() for index in range(3)] == ["0", "1", "2"]
    assert (tmp_path / "coordinator").read_text() == type(client).__name__, "the client in a job is that of submit"


def test_a_job_can_make_actors(client: Any, tmp_path: Path) -> None:
    with set_current_client(client):
        job = client.submit(request(work_with_actors, tmp_path))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert (tmp_path / "total").read_text() == "103"


def test_a_program_can_be_a_job(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    job = client.submit(program("sh", "-c", f"echo spoken; echo written > {tmp_path}/file"))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert (tmp_path / "file").read_text() == "written\n"
    if capabilities.logs_of_programs:
        wait_until(lambda: "spoken" in job.logs(), "its logs")


def test_a_program_with_another_exit_code_than_0_has_failed(client: Any, capabilities: Capabilities) -> None:
    job = client.submit(program("sh", "-c", "exit 3"))
    with pytest.raises(capabilities.program_error) as raised:
        job.wait(timeout=LATE_S)
    assert job.status() == JobStatus.FAILED
    if capabilities.program_error is CalledProcessError:
        assert raised.value.returncode == 3


def test_a_request_without_an_entrypoint_is_a_valueerror(client: Any) -> None:
    with pytest.raises(ValueError, match="entrypoint"):
        client.submit(JobRequest(name=new("nothing"), entrypoint=Entrypoint(), resources=SMALL))


def test_a_second_job_of_a_name_is_adopted_or_separate(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    wanted = request(begin_and_wait, tmp_path / "began", tmp_path / "go")
    first = client.submit(wanted)
    second = client.submit(wanted, True)
    assert (second.job_id == first.job_id) == capabilities.adopts_names
    write(tmp_path / "go")
    assert wait_all([first, second], timeout=LATE_S) == [JobStatus.SUCCEEDED] * 2


def test_a_second_job_of_a_name_can_be_refused(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    wanted = request(begin_and_wait, tmp_path / "began", tmp_path / "go")
    job = client.submit(wanted)
    if capabilities.adopts_names:
        with pytest.raises(JobAlreadyExists) as raised:
            client.submit(wanted, adopt_existing=False)
        assert raised.value.job_name == wanted.name
        assert raised.value.handle is None or raised.value.handle.job_id == job.job_id
    else:
        assert client.submit(wanted, adopt_existing=False).job_id != job.job_id
    write(tmp_path / "go")
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED


def test_a_job_has_the_variables_of_its_environment(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    environment = create_environment(workspace=str(tmp_path), env_vars={"FLAVOUR": "sweet"})
    job = client.submit(request(write_variable, "FLAVOUR", tmp_path / "file", environment=environment))
    job.wait(timeout=LATE_S)
    assert (tmp_path / "file").read_text() == ("sweet" if capabilities.own_variables else "not set")


def test_a_failed_job_restarts_within_its_budget(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    job = client.submit(request(fail_once, tmp_path / "mark", max_retries_failure=1))
    expected = JobStatus.SUCCEEDED if capabilities.retries else JobStatus.FAILED
    assert job.wait(timeout=LATE_S, raise_on_failure=False) == expected


# Many jobs -----------------------------------------------------------------------------------------------------------


def test_wait_all_returns_statuses_in_the_order_of_its_jobs(client: Any, tmp_path: Path) -> None:
    slow = client.submit(request(write_when, tmp_path / "go", tmp_path / "file"))
    bad, good = client.submit(request(fail)), client.submit(request(do_nothing))
    good.wait(timeout=LATE_S)
    write(tmp_path / "go")
    found = wait_all([slow, bad, good], timeout=LATE_S, raise_on_failure=False)
    assert found == [JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.SUCCEEDED]
    assert wait_all([]) == []


def test_wait_all_raises_at_the_first_failure_without_waiting_for_the_rest(client: Any, tmp_path: Path) -> None:
    slow = client.submit(request(write_when, tmp_path / "go", tmp_path / "file"))
    bad = client.submit(request(fail))
    with pytest.raises(JobFailed) as raised:
        wait_all([slow, bad], timeout=LATE_S)
    assert (raised.value.job_id, raised.value.failed_status) == (bad.job_id, JobStatus.FAILED)
    assert not JobStatus.finished(slow.status())
    write(tmp_path / "go")
    slow.wait(timeout=LATE_S)


def test_a_wait_all_that_expires_is_a_timeouterror(client: Any, tmp_path: Path) -> None:
    slow = client.submit(request(write_when, tmp_path / "go", tmp_path / "file"))
    with pytest.raises(TimeoutError):
        wait_all([slow], timeout=SHORT_S)
    write(tmp_path / "go")
    assert wait_all([slow], timeout=LATE_S) == [JobStatus.SUCCEEDED]


# Actors --------------------------------------------------------------------------------------------------------------


def test_an_actors_handle_can_be_used_at_once(client: Any) -> None:
    counter = client.create_actor(Counter, 10, name=new("counter"), resources=SMALL, step=2)
    assert counter.add.remote(1).result(timeout=LATE_S) == 12
    assert counter.add(2) == 16, "a call without remote waits for the answer"
    assert counter.add.submit(k=1).result(timeout=LATE_S) == 18, "and submit is for long calls"


def test_an_actors_exceptions_arrive_as_themselves(client: Any) -> None:
    counter = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    for call in (lambda: counter.fail("bad luck", 5), lambda: counter.fail.remote("bad luck", 5).result(LATE_S)):
        with pytest.raises(Wrong, match=r"^bad luck \(5\)$") as raised:
            call()
        assert raised.value.code == 5
    assert counter.add(1) == 1, "it lives on"


def test_a_future_can_be_asked_again_after_timeouts(client: Any, tmp_path: Path) -> None:
    counter = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    counter.add(1)
    future = counter.wait_for.remote(tmp_path / "go")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.result(timeout=SHORT_S)
    write(tmp_path / "go")
    assert [future.result(timeout=LATE_S), future.result()] == ["came", "came"]


def test_a_call_with_a_dropped_future_still_runs(client: Any, tmp_path: Path) -> None:
    counter = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    counter.write.remote(tmp_path / "file")
    wait_for_file(tmp_path / "file")


def test_unknown_methods_are_attributeerrors_at_access(client: Any) -> None:
    counter = client.create_actor(Counter, 5, name=new("counter"), resources=SMALL)
    assert counter.add(0) == 5
    for name in ("no_such_method", "_secret", "__wrapped__", "n"):
        with pytest.raises(AttributeError):
            getattr(counter, name)
    assert not hasattr(pickle.loads(pickle.dumps(counter)), "_secret")


def test_an_unpickled_handle_reports_unknown_methods_at_the_first_answer(client: Any, tmp_path: Path) -> None:
    counter = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    client.submit(request(try_unknown, counter, tmp_path / "file")).wait(timeout=LATE_S)
    assert (tmp_path / "file").read_text() == "AttributeError"


def test_a_handle_can_be_passed_to_jobs_and_actors(client: Any, tmp_path: Path) -> None:
    counter = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    other = client.create_actor(Counter, name=new("other"), resources=SMALL)
    assert pickle.loads(pickle.dumps(counter)).add(1) == 1
    client.submit(request(add_to, counter, 10, tmp_path / "file")).wait(timeout=LATE_S)
    assert (tmp_path / "file").read_text() == "11"
    assert other.add_elsewhere(counter, 100) == 111
    client.submit(request(lambda: add_to(counter, 1000), name=new("closure"))).wait(timeout=LATE_S)
    assert counter.add(0) == 1111


def test_an_actor_is_called_from_any_thread(client: Any) -> None:
    counter = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    threads = [threading.Thread(target=counter.add, args=(1,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE_S)
    assert counter.add(0) == 10


def test_a_coordinator_is_in_one_call_while_workers_call_it(client: Any) -> None:
    config = ActorConfig(max_concurrency=10)
    coordinator = client.create_actor(Coordinator, name=new("coordinator"), resources=SMALL, actor_config=config)
    run = coordinator.run.submit(3)
    jobs = [client.submit(request(work_for, coordinator, index)) for index in range(3)]
    assert run.result(timeout=LATE_S) == [0, 1, 2]
    wait_all(jobs, timeout=LATE_S)


def test_an_actor_can_make_actors(client: Any) -> None:
    with set_current_client(client):
        manager = client.create_actor(Manager, name=new("manager"), resources=SMALL)
        assert manager.add_up.remote(3).result(timeout=LATE_S) == 6


def test_an_error_of_a_constructor_is_raised_by_the_first_call_at_the_latest(client: Any) -> None:
    with pytest.raises((Wrong, RuntimeError)):
        client.create_actor(Broken, name=new("broken"), resources=SMALL).add.remote(1).result(timeout=LATE_S)


def test_shutdown_on_a_handle_is_an_ordinary_method(client: Any) -> None:
    member = client.create_actor(Member, name=new("member"), resources=SMALL)
    assert member.shutdown() == "an ordinary method"
    assert member.index() == 0, "it lives on"


# Groups --------------------------------------------------------------------------------------------------------------


def test_wait_ready_returns_members_in_order_of_index_every_time(client: Any) -> None:
    name = new("member")
    group = client.create_actor_group(Member, name=name, count=3, resources=SMALL)
    first = group.wait_ready(count=1, timeout=LATE_S)
    assert len(first) == 1
    for _ in range(2):
        members = group.wait_ready(timeout=LATE_S)
        assert answers([member.made_as.remote() for member in members]) == [(index, name) for index in range(3)]
    assert group.ready_count == 3
    group.shutdown()


def test_discover_new_returns_each_member_once_that_wait_ready_did_not(client: Any) -> None:
    group = client.create_actor_group(Member, name=new("member"), count=3, resources=SMALL)
    found = [member.index() for member in group.wait_ready(count=1, timeout=LATE_S)]
    wait_until(lambda: found.extend(member.index() for member in group.discover_new()) or len(found) == 3, "members")
    assert sorted(found) == [0, 1, 2]
    assert group.discover_new() == []
    group.shutdown()


def test_discover_new_returns_no_more_than_make_up_the_target(client: Any) -> None:
    group = client.create_actor_group(Member, name=new("member"), count=3, resources=SMALL)
    group.wait_ready(timeout=LATE_S)
    again = client.create_actor_group(Member, name=new("member"), count=3, resources=SMALL)
    wait_until(lambda: again.ready_count == 3, "the members")
    assert [len(again.discover_new(target=target)) for target in (2, 2, None)] == [2, 0, 1]
    assert group.discover_new(target=5) == []
    assert again._job_id == again.jobs[0].job_id
    for each in (group, again):
        each.shutdown()


def test_a_group_has_jobs_and_statuses_of_its_members(client: Any) -> None:
    name = new("member")
    group = client.create_actor_group(Member, name=name, count=2, resources=SMALL)
    group.wait_ready(timeout=LATE_S)
    assert [f"{name}-{index}" in job.job_id for index, job in enumerate(group.jobs)] == [True, True]
    assert group.statuses() == [JobStatus.RUNNING] * 2 == [job.status() for job in group.jobs]
    assert not group.is_done()
    group.shutdown()
    wait_until(lambda: all(JobStatus.finished(status) for status in group.statuses()), "the end of its jobs")
    wait_until(group.is_done, "the end of the group")


def test_the_names_of_a_group_no_longer_answer_after_shutdown(client: Any, tmp_path: Path) -> None:
    group = client.create_actor_group(Counter, name=new("counter"), count=2, resources=SMALL)
    counters = group.wait_ready(timeout=LATE_S)
    assert answers([counter.add.remote(1) for counter in counters]) == [1, 1]
    group.shutdown()
    group.shutdown()
    for counter in counters:
        assert_dead(counter)
        assert_dead(pickle.loads(pickle.dumps(counter)))


def test_the_shutdown_of_a_group_calls_nothing_on_its_members(client: Any, tmp_path: Path) -> None:
    group = client.create_actor_group(Member, tmp_path, name=new("member"), count=1, resources=SMALL)
    group.wait_ready(timeout=LATE_S)
    group.shutdown()
    wait_until(group.is_done, "the end of the group")
    assert not (tmp_path / "shutdown-0").exists()


def test_the_shutdown_of_a_group_lets_running_calls_finish(
    client: Any, tmp_path: Path, capabilities: Capabilities
) -> None:
    group = client.create_actor_group(Counter, name=new("counter"), count=1, resources=SMALL)
    future = group.wait_ready(timeout=LATE_S)[0].begin_and_wait_for.remote(tmp_path / "began", tmp_path / "go")
    wait_for_file(tmp_path / "began")
    ending = threading.Thread(target=group.shutdown)
    ending.start()
    if capabilities.finishes_calls:
        write(tmp_path / "go")
        assert future.result(timeout=LATE_S) == "came"
    else:
        with pytest.raises(RuntimeError):
            future.result(timeout=LATE_S)
    ending.join(LATE_S)


def test_a_group_with_failing_constructors_raises(client: Any) -> None:
    with pytest.raises((Wrong, RuntimeError)):
        client.create_actor_group(Broken, name=new("broken"), count=2, resources=SMALL).wait_ready(timeout=LATE_S)


def test_a_group_can_be_passed_to_a_job(client: Any, tmp_path: Path) -> None:
    group = client.create_actor_group(Member, name=new("member"), count=2, resources=SMALL)
    client.submit(request(use_group, group, tmp_path)).wait(timeout=LATE_S)
    assert (tmp_path / "indices").read_text() == "0,1"
    group.shutdown()


# Current actor -----------------------------------------------------------------------------------------------------


def test_an_actor_is_current_in_its_constructor_and_methods(client: Any) -> None:
    name = new("alone")
    member = client.create_actor(Member, name=name, resources=SMALL)
    assert [member.made_as(), member.now.remote().result(timeout=LATE_S)] == [(0, name)] * 2
    assert member.handle().made_as() == (0, name), "and passes its handle to others"


def test_an_actor_that_sets_its_shutdown_event_has_succeeded(client: Any) -> None:
    group = client.create_actor_group(Ending, name=new("ending"), count=1, resources=SMALL)
    (member,) = group.wait_ready(timeout=LATE_S)
    member.end.remote().result(timeout=LATE_S)
    assert group.jobs[0].wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    wait_until(group.is_done, "the end of the group")
    assert_dead(member)


def test_the_job_of_an_actor_that_fails_raises_its_error(client: Any, capabilities: Capabilities) -> None:
    group = client.create_actor_group(Ending, name=new("ending"), count=1, resources=SMALL)
    group.wait_ready(timeout=LATE_S)[0].give_up.remote()
    with pytest.raises(Wrong if capabilities.carries_errors else JobFailed) as raised:
        group.jobs[0].wait(timeout=LATE_S)
    assert "no more of this (7)" in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def test_an_actor_has_the_variables_of_its_environment(client: Any, tmp_path: Path, capabilities: Capabilities) -> None:
    environment = create_environment(workspace=str(tmp_path), env_vars={"FLAVOUR": "sweet"})
    expected = "sweet" if capabilities.own_variables else "not set"
    actor = client.create_actor(Ending, name=new("variable"), resources=SMALL, environment=environment)
    assert actor.variable.remote("FLAVOUR").result(timeout=LATE_S) == expected
    group = client.create_actor_group(Ending, name=new("variables"), count=1, resources=SMALL, environment=environment)
    assert group.wait_ready(timeout=LATE_S)[0].variable.remote("FLAVOUR").result(timeout=LATE_S) == expected
    for each in (actor, group.wait_ready()[0]):
        each.end.remote()


def test_code_outside_actors_has_no_current_actor() -> None:
    with pytest.raises(RuntimeError, match="current_actor"):
        current_actor()


# Actors in this process ----------------------------------------------------------------------------------------------


def test_a_hosted_actor_lives_in_its_callers_process(client: Any, tmp_path: Path) -> None:
    hosted = client.host_actor(Counter, 5, name=new("hosted"), actor_config=ActorConfig(max_concurrency=4), step=2)
    assert hosted.handle.pid() == os.getpid()
    client.submit(request(add_to, hosted.handle, 1, tmp_path / "file")).wait(timeout=LATE_S)
    assert (tmp_path / "file").read_text() == "7"
    hosted.shutdown()
    hosted.shutdown()
    assert_dead(hosted.handle)


def test_a_hosted_actor_that_sets_its_shutdown_event_ends(client: Any) -> None:
    hosted = client.host_actor(Ending, name=new("hosted"), actor_config=ActorConfig(max_concurrency=4))
    hosted.handle.end()
    with pytest.raises(ActorUnavailableError):
        while True:
            hosted.handle.add(1)


def test_a_job_hosts_an_actor_for_its_own_jobs(client: Any, tmp_path: Path) -> None:
    with set_current_client(client):
        job = client.submit(request(host_and_coordinate, tmp_path, 2))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert (tmp_path / "total").read_text() == "2"


# The client ----------------------------------------------------------------------------------------------------------


def test_a_set_client_is_the_current_one(client: Any) -> None:
    with set_current_client(client) as same:
        assert current_client() is client is same


def test_shutdown_can_be_repeated_and_refuses_later_jobs(make_client: Any) -> None:
    client = make_client()
    job = client.submit(request(do_nothing))
    client.shutdown()
    client.shutdown(wait=False)
    assert JobStatus.finished(job.status())
    with pytest.raises(RuntimeError):
        client.submit(request(do_nothing))
