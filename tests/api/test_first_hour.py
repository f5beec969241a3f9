"""Mistakes of a first program: each gives one error that names the line that was meant."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

import pytest
import trio
import trio.lowlevel

import fray
import fray.blocking
import fray.v2
from fray import Entrypoint, InvalidRequest, JobRequest, ResourceConfig
from tests.support.job_functions import Counter


def seven(*args: object) -> int:
    return 7


# Requests


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JobRequest("x", Entrypoint.from_callable(seven)), r"write JobRequest\('x', entrypoint=\.\.\.\)"),
        (lambda: JobRequest("x", seven), r"write JobRequest\('x', entrypoint=\.\.\.\)"),
        (lambda: JobRequest("x", {"cpu": 1}), r"write resources=ResourceConfig\(cpu=1, memory='2GB'\)"),
        (lambda: JobRequest("x", entrypoint=ResourceConfig()), r"write JobRequest\('x', resources=\.\.\., entrypoint="),
        (lambda: JobRequest("x", entrypoint="ls -l"), r"write Entrypoint.from_binary\('ls', \['-l'\]\)"),
        (lambda: Entrypoint.from_callable(seven, args=("hello")), r"write args=\('hello',\)"),
        (lambda: Entrypoint.from_callable(seven, args=5), r"write args=\(5,\)"),
        (lambda: Entrypoint.from_callable(seven, kwargs=("a",)), r"kwargs=\('a',\) must be a dict"),
        (lambda: Entrypoint.from_binary("sh", "-c"), r"write args=\('-c',\)"),
    ],
)
def test_a_request_with_swapped_or_unwrapped_arguments_says_the_line_that_was_meant(make: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_a_function_without_arguments_is_an_entrypoint() -> None:
    assert JobRequest("x", entrypoint=seven) == JobRequest("x", entrypoint=Entrypoint.from_callable(seven))

    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            assert await (await cluster.launch(JobRequest("seven", entrypoint=seven))).wait() == 7

    trio.run(main)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResourceConfig.with_gpu(1), r"gpu_type=1 .* write ResourceConfig.with_gpu\(count=1\)"),
        (lambda: ResourceConfig.with_tpu(8), r"tpu_type=8 .* write ResourceConfig.with_tpu\('v5litepod-8'\)"),
        (lambda: ResourceConfig.with_gpu(None), "gpu_type=None must be a type or a list of types"),
        (lambda: ResourceConfig(gpus=2), r"no parameter 'gpus': write ResourceConfig.with_gpu\(count=2\)"),
        (lambda: ResourceConfig(gpu="h100"), r"no parameter 'gpu': write ResourceConfig.with_gpu\('h100'\)"),
        (lambda: ResourceConfig.with_gpu("h100", gpus=2), r"no parameter 'gpus': write .*count=2"),
        (lambda: ResourceConfig(cpus=2), "no parameter 'cpus': write cpu=2"),
        (lambda: ResourceConfig(memroy="1GB"), r"no parameter 'memroy'; did you mean memory\?"),
        (lambda: ResourceConfig(device="h100"), r"write ResourceConfig.with_gpu\('h100'\)"),
    ],
)
def test_resources_in_the_words_of_other_libraries_say_what_to_write(make: Any, message: str) -> None:
    with pytest.raises((InvalidRequest, TypeError), match=message):
        make()


@pytest.mark.parametrize("resources", [ResourceConfig.with_gpu(), ResourceConfig.with_tpu("v5e-8")])
def test_a_device_that_the_cluster_can_never_have_is_refused_at_once_on_all_faces(resources: ResourceConfig) -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            with pytest.raises(fray.NeverSchedulable, match=r"'x' can never run here: .* no machine has a (gpu|tpu)"):
                await cluster.launch(JobRequest("x", resources, seven))
            with pytest.raises(fray.NeverSchedulable, match="can never run here"):
                await cluster.create_actor(Counter, resources=resources)

    trio.run(main)
    with (
        fray.blocking.open_cluster("local") as cluster,
        cluster.open_scope() as scope,
        pytest.raises(fray.NeverSchedulable, match="no machine has a"),
    ):
        scope.run(seven, resources=resources)


# Names


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (fray, "JobRequets", r"'fray' has no attribute 'JobRequets'; did you mean JobRequest\?"),
        (fray, "open_clutser", r"; did you mean open_cluster\?"),
        (fray, "jobrequest", r"; did you mean JobRequest\?"),
        (fray, "zzz", "has no attribute 'zzz'$"),
        (fray.blocking, "JobRequets", r"'fray.blocking' has no attribute 'JobRequets'; did you mean JobRequest\?"),
        (fray.v2, "JobRequets", r"'fray.v2' has no attribute 'JobRequets'; did you mean JobRequest"),
        (fray.blocking, "NotPicklable", "has no attribute 'NotPicklable': write fray.NotPicklable"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_similar_names(module: ModuleType, name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(module, name)


def test_dir_lists_the_public_names_before_the_first_of_them_is_used() -> None:
    program = """
import fray
assert {"JobRequest", "open_cluster", "WorkerPool", "blocking", "v2"} <= set(dir(fray)), dir(fray)
assert not {"Any", "TYPE_CHECKING", "importlib", "load"} & set(dir(fray)), dir(fray)
import fray.blocking
assert dir(fray.blocking) == sorted(fray.blocking.__all__)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


# Launches


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ((seven,), r"write scope.run\(seven\), or launch\(JobRequest\('seven', entrypoint=seven\)\)"),
        ((seven, 1), r"write scope.run\(seven, 1\), or .*Entrypoint.from_callable\(seven, args=\(1,\)\)"),
        ((seven, 1, "b"), r"from_callable\(seven, args=\(1, 'b'\)\)"),
        ((dict, 1), r"write create_actor\(dict, 1\) for an actor"),
        ((Entrypoint.from_callable(seven),), r"write launch\(JobRequest\('a-name', entrypoint=\.\.\.\)\)"),
        ((JobRequest("a"), 1), "launch takes one JobRequest, and got 1 too: launch_all takes a list"),
    ],
)
def test_a_launch_of_anything_but_a_request_says_the_line_that_was_meant(what: tuple[Any, ...], message: str) -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            for owner in (cluster, scope):
                with pytest.raises(InvalidRequest, match=message):
                    await owner.launch(*what)

    trio.run(main)
    with fray.blocking.open_cluster("local") as cluster, cluster.open_scope() as scope:
        for owner in (cluster, scope):
            with pytest.raises(InvalidRequest, match=message):
                owner.launch(*what)


def test_a_request_or_a_value_in_place_of_the_function_of_run_says_the_line_that_was_meant() -> None:
    request, text = JobRequest("x", entrypoint=seven), "a JobRequest: write launch"
    wrong: list[tuple[Any, str]] = [(request, text), (3, r"not 3: write run\(function, arguments")]

    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            for what, message in wrong:
                with pytest.raises(InvalidRequest, match=message):
                    await scope.run(what)

    trio.run(main)
    with fray.blocking.open_cluster("local") as cluster, cluster.open_scope() as scope:
        for what, message in wrong:
            with pytest.raises(InvalidRequest, match=message):
                scope.run(what)


# Results without await


@pytest.mark.filterwarnings("ignore:a call of Fray was never awaited")
def test_an_operation_on_a_result_that_was_not_awaited_names_the_variable_and_the_line_that_was_meant() -> None:
    async def add(scope: Any) -> None:
        counter = await scope.create_actor(Counter, name="counter")
        x = counter.add(3)
        x + 1

    async def wait(scope: Any) -> None:
        job = scope.launch(JobRequest("seven", entrypoint=seven))
        job.wait()

    async def send(scope: Any) -> None:
        counter = await scope.create_actor(Counter, name="counter")
        await counter.add(counter.add(2))

    async def main(body: Any) -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            await body(scope)

    for body, note in (
        (add, "`x` is a coroutine, not a result: write `x = await counter.add(...)`"),
        (wait, "`job` is a coroutine, not a result: write `job = await scope.launch(...)`"),
        (send, "an argument is a coroutine, not a result: write `await counter.add(...)`"),
    ):
        with pytest.raises(ExceptionGroup) as caught:
            trio.run(main, body)
        (error,) = caught.value.exceptions
        assert error.__notes__ == [note]
        del error, caught  # with them, the frame of the test would keep the coroutine
        gc.collect()


async def not_of_fray() -> None:
    pass


@pytest.mark.filterwarnings("default")
def test_a_call_that_was_not_awaited_is_a_warning_at_its_line_with_what_to_write() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            counter = await scope.create_actor(Counter, name="counter")
            job = await scope.launch(JobRequest("seven", entrypoint=seven))
            for call, meant in (
                (lambda: counter.add(3), "await counter.add(...)"),
                (lambda: job.wait(), "await job.wait()"),
                (lambda: scope.launch(JobRequest("seven", entrypoint=seven)), "await scope.launch(...)"),
                (lambda: scope.run(seven), "await scope.run(...)"),
                (lambda: cluster.poll(job), "await cluster.poll(...)"),
            ):
                with pytest.warns(RuntimeWarning, match=re.escape(f"it was not made: write `{meant}`")) as caught:
                    call()
                assert caught[0].filename == __file__
            with pytest.warns(RuntimeWarning, match=r"^coroutine 'not_of_fray' was never awaited$") as caught:
                not_of_fray()
            assert caught[0].filename == __file__

    trio.run(main)


@pytest.mark.filterwarnings("default")
def test_a_scope_that_ends_with_a_variable_that_was_never_awaited_names_it() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            async with cluster.open_scope() as scope:
                counter = await scope.create_actor(Counter, name="counter")
                total = counter.add(3)
                done = await counter.add(4)
            del total
            assert done == 4

    with pytest.warns(RuntimeWarning) as caught:
        trio.run(main)
    assert [str(each.message) for each in caught] == [
        "`cluster.open_scope(...) as scope` ends and `total` was never awaited: write `total = await counter.add(...)`"
    ]


# Blocks that were not entered

ASYNC_LINE = r"write `async with fray.open_cluster\(\.\.\.\) as cluster:`"


def test_an_async_block_that_is_not_entered_with_async_with_says_so() -> None:
    sync = r", or in sync code `with fray.blocking.open_cluster\(\.\.\.\) as cluster:`$"
    with pytest.raises(TypeError, match=ASYNC_LINE + sync), fray.open_cluster("local"):
        pass
    with pytest.raises(AttributeError, match="no 'launch' here: this was not entered; " + ASYNC_LINE + sync):
        fray.open_cluster("local").launch(JobRequest("x"))

    async def main() -> None:
        with pytest.raises(TypeError, match=ASYNC_LINE):
            await fray.open_cluster("local")
        async with fray.open_cluster("local") as cluster:
            line_of_scope = r"write `async with cluster.open_scope\(\.\.\.\) as scope:`$"
            with pytest.raises(AttributeError, match="no 'run' here: this was not entered; " + line_of_scope):
                await cluster.open_scope("x").run(seven)
            with pytest.raises(TypeError, match=line_of_scope), cluster.open_scope("x"):
                pass
        with pytest.raises(fray.BlockingNotAllowed, match="in async code " + ASYNC_LINE):
            fray.blocking.open_cluster("local")

    trio.run(main)


def test_a_blocking_scope_that_is_not_entered_with_with_says_so() -> None:
    line = r"write `with cluster.open_scope\(\.\.\.\) as scope:`"
    with fray.blocking.open_cluster("local") as cluster:
        scope = cluster.open_scope("x")
        assert repr(scope) == "<Scope, not entered>"
        for use in (lambda: scope.run(seven), lambda: scope.create_actor(Counter), lambda: scope.name):
            with pytest.raises(fray.FrayError, match="this scope was not entered: " + line):
                use()
        with pytest.raises(AttributeError, match="no attribute 'lanch'; did you mean launch"):
            scope.lanch()

        async def main() -> None:
            with pytest.raises(TypeError, match="a scope of fray.blocking: " + line):
                async with cluster.open_scope("x"):
                    pass
            with pytest.raises(TypeError, match="a cluster of fray.blocking: in async code " + ASYNC_LINE):
                async with cluster:
                    pass

        trio.run(main)


# Actors


def test_a_taken_actor_name_mentions_the_actor_and_how_to_get_it() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster:
            await cluster.create_actor(Counter, name="counter")
            with pytest.raises(
                fray.NameInUse, match=r"^actor name 'counter' .* actor counter-\w+ .*get_actor\('counter'\)"
            ):
                await cluster.create_actor(Counter, name="counter")
            with pytest.raises(fray.NameInUse, match=r"^job name 'counter' .* actor counter-\w+ .*has it; wait"):
                await cluster.launch(JobRequest("counter", entrypoint=seven))

    trio.run(main)


# Arguments


def test_a_cluster_or_scope_as_an_argument_says_what_to_pass_instead() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            counter = await scope.create_actor(Counter)
            with pytest.raises(fray.NotPicklable, match=r"^argument 1 of seven\(\) in job .* fray.current_cluster\(\)"):
                await scope.run(seven, cluster)
            with pytest.raises(fray.NotPicklable, match=r"^argument 1 of Counter\(\) in actor 'c' .*pass handles"):
                await scope.create_actor(Counter, scope, name="c")
            with pytest.raises(fray.NotPicklable, match=r"^argument 1 of add\(\) .*: item 'a': a scope belongs to its"):
                await counter.add({"a": scope})
            assert await scope.run(seven, counter) == 7

    trio.run(main)
    with fray.blocking.open_cluster("local") as cluster, cluster.open_scope() as scope:
        with pytest.raises(fray.NotPicklable, match=r"call fray.blocking.current_cluster\(\) in the job"):
            scope.run(seven, cluster)
        with pytest.raises(fray.NotPicklable, match=r"fray.blocking.current_cluster\(\).open_scope\(\)"):
            scope.run(lambda: scope)


class Refuses:
    def __reduce__(self) -> NoReturn:
        raise LookupError("not me")


def test_an_argument_that_cannot_be_pickled_is_counted_or_named_without_further_tracebacks() -> None:
    async def main() -> None:
        async with fray.open_cluster("local") as cluster, cluster.open_scope() as scope:
            lock = threading.Lock()
            for run, message in (
                (
                    lambda: scope.run(seven, 1, lock),
                    r"^argument 2 of seven\(\) in job 'seven-\w+' .* sent: ",
                ),
                (
                    lambda: scope.run(seven, path=[lock]),
                    r"^argument 'path' of seven\(\) in job .* item 0: cannot",
                ),
                (
                    lambda: scope.run(lambda: lock),
                    r"^<lambda>\(\) in job .* sent: variable 'lock' of <la",
                ),
                (
                    lambda: scope.create_actor(Counter, start=lock, name="c"),
                    r"^argument 'start' of Counter\(\) in",
                ),
            ):
                with pytest.raises(fray.NotPicklable, match=message) as caught:
                    await run()
                assert "\n".join(traceback.format_exception(caught.value)).count("Traceback") == 1
            with pytest.raises(fray.NotPicklable, match="not me") as caught:
                await scope.run(seven, Refuses())
            assert isinstance(caught.value.__cause__, LookupError), "its traceback leads to the reducer"
            assert "\n".join(traceback.format_exception(caught.value)).count("Traceback") == 2

    trio.run(main)
