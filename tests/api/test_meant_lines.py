"""Mistakes of a first program with each interface: one short error that names the line that was meant."""

from __future__ import annotations

import asyncio
import linecache
import threading
import traceback
from types import ModuleType
from typing import Any

import pytest
import trio

import fray
import fray.aio
import fray.blocking
import fray.v2
from tests.support.job_functions import Counter

FACES = {"fray": fray, "fray.blocking": fray.blocking, "fray.aio": fray.aio}
BODY = """
async def main():
    async with face.open_cluster("local", logs=False) as cluster:
        async with cluster.open_scope("run") as scope:
            LINE
"""
SMALL = fray.ResourceConfig(cpu=0.01)


def f(*args: object) -> None:
    pass


def sync(line: str) -> str:
    return line.replace("async ", "").replace("await ", "")


def error_of(face: str, line: str) -> Exception:
    """Return the error of a line in a scope, of a program with this interface."""
    source = BODY.replace("LINE", line)
    source = sync(source) if face == "fray.blocking" else source
    linecache.cache["PROGRAM"] = (len(source), None, source.splitlines(keepends=True), "PROGRAM")
    names: dict[str, Any] = {
        **{name: getattr(fray, name) for name in ("JobRequest", "Entrypoint", "ResourceConfig", "ReservationConfig")},
        "face": FACES[face],
        "fray": fray,
        "f": f,
        "Counter": Counter,
        "SMALL": SMALL,
        "Lock": threading.Lock,
    }
    exec(compile(source, "PROGRAM", "exec"), names)
    main = names["main"]
    try:
        if face == "fray.blocking":
            main()
        else:
            trio.run(main) if face == "fray" else asyncio.run(main())
    except Exception as error:  # noqa: BLE001 (its kind is the subject of the test)
        while isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        return error
    raise AssertionError(f"no error: {line}")


FAILING = """
def fail(*args):
    raise LookupError("far")

class Failing:
    fail = fail
    async def fail_async(self):
        fail()
    def rows(self):
        yield 1
        fail()

async def all_of(stream):
    async with stream as rows:
        return [row async for row in rows]
"""
LAUNCH = "JobRequest('a-name', entrypoint=Entrypoint.from_callable(function, args=(...)))"
REQUEST = "JobRequest('f', entrypoint=Entrypoint.from_callable(f, args=(1,)))"


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("face.JobRequets", "has no attribute 'JobRequets'; did you mean JobRequest?"),
        ("face.wait_all([])", "has no attribute 'wait_all': write `await cluster.wait([job, ...])`"),
        (
            "await cluster.run(f)",
            "' object has no attribute 'run': write `async with cluster.open_scope() as scope:`, and in it "
            "`await scope.run(function, ...)`",
        ),
        ("await cluster.submit(f)", f"no attribute 'submit': write `await cluster.launch({LAUNCH})`"),
        ("await cluster.lanch(f)", "' object has no attribute 'lanch'; did you mean launch"),
        ("await scope.submit(f)", "write `await scope.run(function, ...)`, or `await scope.launch("),
        ("scope.start_soon(f)", f"'Scope' object has no attribute 'start_soon': write `await scope.launch({LAUNCH})`"),
        ("await scope.launch(f, 1)", f"write scope.run(f, 1), or launch({REQUEST})"),
        ("await cluster.launch(f, 1)", f"write scope.run(f, 1), or launch({REQUEST})"),
        ("await scope.run(JobRequest('x', entrypoint=f))", "a JobRequest: write launch"),
        ("await (await scope.launch(JobRequest('x', entrypoint=f))).get()", "write `await job.wait()`"),
        ("(await scope.launch(JobRequest('x', entrypoint=f))).status", "write `job.info.state`"),
        ("JobRequest('x', Entrypoint.from_callable(f))", "write JobRequest('x', entrypoint=...)"),
        ("Entrypoint.from_callable(f, args=('hello'))", "write args=('hello',)"),
        ("ResourceConfig.with_gpu(1)", "write ResourceConfig.with_gpu(count=1)"),
        ("ResourceConfig(gpus=1)", "write ResourceConfig.with_gpu(count=1)"),
        ("ResourceConfig(memory='4 gigs')", "memory='4 gigs' is not a valid size: write a number of bytes or for"),
        ("await scope.run(f, Lock())", "argument 1 of f() in job 'f-"),
        ("await scope.run(f, path=Lock())", "argument 'path' of f() in job 'f-"),
        ("await scope.create_actor(Counter, start=Lock())", "argument 'start' of Counter() in actor "),
        ("a = await scope.create_actor(Counter); await a.add(n=Lock())", "argument 'n' of add() "),
        ("await scope.run(f, cluster)", "argument 1 of f() in job "),
        ("await scope.run(f, scope)", "a scope belongs to its process: pass handles of its jobs and actors"),
        ("for _ in 'ab': await scope.create_actor(Counter, name='c')", "get_actor('c')"),
        ("await cluster.get_actor('absent')", "'absent'"),
        ("await scope.create_actor_group(Counter, num=2)", "missing 1 required keyword-only argument: 'count'"),
        ("a = await scope.create_actor(Counter); await a.ad(3)", "no public method 'ad'; did you mean add?"),
        ("await scope.run(f, resources=ResourceConfig.with_gpu('h100'))", "no machine has a gpu"),
        ("await cluster.open_scope('x').run(f)", "not entered"),
        ("await cluster.create_reservation(ReservationConfig(SMALL, 0, 0))", "ReservationConfig"),
        ("await scope.launch_group([])", ""),
    ],
)
def test_a_wrong_line_is_one_short_error_that_says_what_to_write(face: str, line: str, message: str) -> None:
    error = error_of(face, line)
    assert (sync(message) if face == "fray.blocking" else message) in str(error)
    text = "".join(traceback.format_exception(error))
    kept = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert {code.co_filename for code in kept} == {"PROGRAM"}, text
    assert text.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("face", "line", "message"),
    [
        ("fray", "await a.add.remote(1)", "write `future = actor.method.start(...)`, and `await future`"),
        ("fray.aio", "await a.add.remote(1)", "write `future = actor.method.start(...)`, and `await future`"),
        ("fray.blocking", "a.add.start(1)", "write `future = actor.method.remote(...)`, and `future.result()`"),
    ],
)
def test_the_name_of_another_interface_for_starting_a_call_says_its_own(face: str, line: str, message: str) -> None:
    assert message in str(error_of(face, f"a = await scope.create_actor(Counter); {line}"))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("other", FACES)
def test_a_pool_of_another_interface_than_its_cluster_says_which_to_write(face: str, other: str) -> None:
    if face != other:
        error = error_of(face, f"{other}.WorkerPool(cluster, 1)")
        assert str(error) == f"this cluster is of {face}: write {face}.WorkerPool(cluster, ...)"
    else:
        assert "needs a cluster, not a int" in str(error_of(face, f"{other}.WorkerPool(3, 1)"))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "line",
    [
        "await scope.run(fail, resources=SMALL)",
        "a = await scope.create_actor(Failing); await a.fail()",
        "a = await scope.create_actor(Failing); await a.fail_async()",
        "a = await scope.create_actor(Failing); await all_of(a.rows.stream())",
        "async with face.WorkerPool(cluster, 1, SMALL) as pool: await GET(pool.submit(fail))",
        "async with face.WorkerPool(cluster, 1, SMALL) as pool: [await GET(each) for each in pool.map(fail, [1, 2])]",
        "await (await scope.launch_group([JobRequest('x', SMALL, entrypoint=fail)])).wait()",
    ],
)
def test_failures_of_jobs_actors_streams_pools_and_groups_are_short(
    face: str, line: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    get = "lambda future: future.result()" if face == "fray.blocking" else "lambda future: future"
    monkeypatch.setattr(__name__ + ".BODY", f"{FAILING}\nGET = {get}\n{BODY}")
    error = error_of(face, line)
    assert isinstance(error, LookupError | fray.FrayError)
    assert {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)} == {"PROGRAM"}


async def test_errors_of_calls_that_are_not_read_are_silent_as_in_the_other_interfaces(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fray.aio.open_cluster("local", logs=False) as cluster, cluster.open_scope() as scope:
            counter = await scope.create_actor(Counter)
            futures = [counter.add.start("x") for _ in range(3)]
            with pytest.raises(TypeError):
                await futures[0]
            await asyncio.wait(futures)
            del futures

    await trio.to_thread.run_sync(asyncio.run, main())
    assert "never retrieved" not in capfd.readouterr().err + caplog.text


CLIENT = fray.v2.LocalClient()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda v2: CLIENT.submit(f),
            r"write client.submit\(JobRequest\(name='f', entrypoint=Entrypoint.from_callable\(f, args=\(\.\.\.\)\)\)\)",
        ),
        (lambda v2: CLIENT.submit(v2.Entrypoint.from_callable(f)), r"write client.submit\(JobRequest\(name='a-name'"),
        (lambda v2: CLIENT.submit(fray.JobRequest("x", entrypoint=f)), "submit takes a fray.v2.JobRequest"),
        (lambda v2: CLIENT.run(f), r"'LocalClient' object has no attribute 'run': write `client.submit\(JobRequest"),
        (lambda v2: CLIENT.sumbit(f), "did you mean submit"),
        (lambda v2: CLIENT.create_actor(Counter), "missing 1 required keyword-only argument: 'name'"),
        (lambda v2: v2.JobRequets, "did you mean JobRequest"),
        (lambda v2: v2.JobRequest("x", v2.ResourceConfig()), r"write JobRequest\('x', entrypoint=\.\.\., resources="),
        (lambda v2: v2.JobRequest("x", f, f), r"write JobRequest\('x', entrypoint=\.\.\., resources=ResourceConfig"),
        (lambda v2: v2.JobRequest("x", "ls -l"), r"write Entrypoint.from_binary\('ls', \['-l'\]\)"),
        (lambda v2: v2.Entrypoint.from_callable(f, args=("hello")), r"write args=\('hello',\)"),
        (lambda v2: v2.ResourceConfig.with_gpu(1), r"write ResourceConfig.with_gpu\(count=1\)"),
        (lambda v2: v2.ResourceConfig.with_tpu(8), r"write ResourceConfig.with_tpu\('v5litepod-8'\)"),
        (lambda v2: v2.ResourceConfig(gpus=1), r"write ResourceConfig.with_gpu\(count=1\)"),
        (lambda v2: v2.ResourceConfig(memory="4 gigs"), r"no parameter 'memory': write ram='2g'"),
        (lambda v2: v2.ResourceConfig(ram="4 gigs"), r"ram='4 gigs' is not a valid size"),
    ],
)
def test_a_wrong_line_with_v2_says_what_to_write(make: Any, message: str) -> None:
    v2: ModuleType = fray.v2
    with pytest.raises((ValueError, TypeError, AttributeError), match=message) as caught:
        make(v2)
    files = [frame.f_code for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert {code.co_filename for code in files if code.co_name != "__getattr__"} == {__file__}


def test_a_function_is_an_entrypoint_of_v2_and_its_error_is_short() -> None:
    request = fray.v2.JobRequest(name="x", entrypoint=f)  # type: ignore[arg-type]
    assert request == fray.v2.JobRequest("x", fray.v2.Entrypoint.from_callable(f))
    failing = fray.v2.JobRequest("x", fray.v2.Entrypoint.from_callable(lambda: int("x")))
    with pytest.raises(ValueError, match="invalid literal") as caught:
        CLIENT.submit(failing).wait()
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(caught.value.__traceback__)}
    assert files == {__file__}
