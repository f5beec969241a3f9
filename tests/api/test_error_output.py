"""Output on a terminal when a program on Fray fails: each failure once, with the frames of the program alone."""

from __future__ import annotations

import linecache
import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fray
from fray import JobRequest
from fray.errors import RemoteTraceback
from fray.model.ids import split_attempt
from fray.runtime.serialization.errors import dump_error, load_error
from fray.tracebacks import shorten_traceback, traceback_entries, traceback_text
from tests.support import job_functions

HEAD = """
import os, signal, threading, trio
import fray
from fray import Entrypoint, JobRequest, ResourceConfig

SMALL = ResourceConfig(cpu=0.01)
def load(path):
    return open(path).read()

async def nested(depth):
    async with fray.current_cluster().open_scope(f"at {depth}") as scope:
        fn, args = (nested, (depth - 1,)) if depth else (load, ("missing.txt",))
        return await scope.run(fn, *args, resources=SMALL)

async def forever():
    await trio.sleep_forever()

async def main():
    async with fray.open_cluster("local", logs=False) as cluster:
        async with cluster.open_scope("run") as scope:
            BODY

trio.run(main)
"""
LAUNCH = """entry = Entrypoint.from_callable(load, args=("missing.txt",))
            await (await scope.launch(JobRequest(name="load", entrypoint=entry))).wait()"""
INTERRUPT = """threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            await trio.sleep(30)"""

TOP = """\
  + Exception Group Traceback (most recent call last):
  |   File "PROGRAM", line N, in <module>
  |     trio.run(main)
  |   File "TRIO", line N, in run
  |     raise runner.main_task_outcome.error
  |   File "PROGRAM", line 20, in main
  |     async with cluster.open_scope("run") as scope:
"""
CHAINED = """\
    |
    | The above exception was the direct cause of the following exception:
    |
    | Traceback (most recent call last):
"""
END = """\
    |   File "PROGRAM", line 8, in load
    |     return open(path).read()
    | FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'
    | raised in job load-ID on local
    +------------------------------------
"""
PLACE = 'File "PROGRAM", line 8, in load: return open(path).read()'
JOB_OUTPUT = f"""\
{TOP}\
  | ExceptionGroup: in scope 'run': job load failed (1 sub-exception)
  +-+---------------- 1 ----------------
    | fray.errors.RemoteTraceback: driver › load on machine local: {PLACE}
{CHAINED}\
    |   File "PROGRAM", line 22, in main
    |     await (await scope.launch(JobRequest(name="load", entrypoint=entry))).wait()
{END}"""
TREE_OUTPUT = f"""\
{TOP}\
  | ExceptionGroup: in scope 'run': job nested-N failed (1 sub-exception)
  +-+---------------- 1 ----------------
    | fray.errors.RemoteTraceback: driver › nested-N › nested-N › nested-N › load-N on machine local: {PLACE}
{CHAINED}\
    |   File "PROGRAM", line 21, in main
    |     await scope.run(nested, 2, resources=SMALL)
    |   File "PROGRAM", line 13, in nested
    |     return await scope.run(fn, *args, resources=SMALL)
    |   File "PROGRAM", line 13, in nested
    |     return await scope.run(fn, *args, resources=SMALL)
    |   File "PROGRAM", line 13, in nested
    |     return await scope.run(fn, *args, resources=SMALL)
{END}"""
ARGUMENT_OUTPUT = f"""\
{TOP}\
  | ExceptionGroup: in scope 'run' (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "PROGRAM", line 21, in main
    |     ResourceConfig(memory="4 gigs")
    | fray.errors.InvalidRequest: memory='4 gigs' is not a valid size: write a number of bytes or for example \
'512MB', '2GB'; at most 1152921504606846976
    +------------------------------------
"""
INTERRUPT_OUTPUT = """\
  File "PROGRAM", line 22, in main
    await trio.sleep(30)
KeyboardInterrupt
"""
BLOCKING = """
import os, signal, threading
import fray.blocking as fray

def load(path):
    return open(path).read()

with fray.open_cluster("local", logs=False) as cluster:
    with cluster.open_scope("run") as scope:
        BODY
"""
BLOCKING_OUTPUT = f"""\
  + Exception Group Traceback (most recent call last):
  |   File "PROGRAM", line 9, in <module>
  |     with cluster.open_scope("run") as scope:
  | ExceptionGroup: in scope 'run': job load-N failed (1 sub-exception)
  +-+---------------- 1 ----------------
    | fray.errors.RemoteTraceback: driver › load-N on machine local: {PLACE.replace("8", "6")}
{CHAINED}\
    |   File "PROGRAM", line 10, in <module>
    |     scope.run(load, "missing.txt")
{END.replace("line 8", "line 6")}"""


def output(tmp_path: Path, body: str, head: str = HEAD, **environ: str) -> str:
    """Return what the program prints: markers below a line left out, paths, ids and Trio's lines made equal."""
    program = tmp_path / "program.py"
    program.write_text(head.replace("BODY", body))
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (1, -signal.SIGINT)
    return normal(done.stdout + done.stderr, program)


def normal(text: str, program: Path) -> str:
    text = re.sub(r"(?m)^[ |]*[~^]+\n", "", text)
    text = re.sub(r'"[^"]*/trio/_core/_run.py", line \d+', '"TRIO", line N', text)
    text = re.sub(r"line \d+(, in <module>\n.*trio.run)", r"line N\1", text)
    text = re.sub(r"\b(load|nested|job|s\d)(-[a-z0-9]{6})?-[a-z0-9]{12}\b", r"\1-ID", text)
    text = re.sub(r"\b(load|nested)-[a-z0-9]{6}\b", r"\1-N", text)
    return re.sub(r"(?m)[ ]+$", "", text.replace(str(program), "PROGRAM"))


@pytest.mark.parametrize(
    ("body", "expected", "limit"),
    [
        (LAUNCH, JOB_OUTPUT, 25),
        ("await scope.run(nested, 2, resources=SMALL)", TREE_OUTPUT, 35),
        ('ResourceConfig(memory="4 gigs")', ARGUMENT_OUTPUT, 12 + 2),  # 2: the line of `trio.run` in the program
        (INTERRUPT, INTERRUPT_OUTPUT, 3),
    ],
    ids=["job", "tree", "argument", "interrupt"],
)
def test_a_terminal_shows_a_failure_once_and_short(tmp_path: Path, body: str, expected: str, limit: int) -> None:
    assert output(tmp_path, body) == expected
    assert expected.count("\n") <= limit


def test_a_wrong_argument_takes_at_most_twelve_lines_with_one_frame_of_the_users(tmp_path: Path) -> None:
    # That frame is in the group and in its member. With Trio, `trio.run` in the program is a second frame.
    shown = output(
        tmp_path, 'fray.ResourceConfig(memory="4 gigs")', BLOCKING.replace("import fray.", "import fray, fray.")
    )
    assert shown.count(", in ") == 2
    assert shown.count("\n") == 10
    alone = output(tmp_path, "", 'import fray\n\nfray.ResourceConfig(memory="4 gigs")\n')
    assert alone.count("\n") == 4


def test_sync_code_shows_the_same(tmp_path: Path) -> None:
    assert output(tmp_path, 'scope.run(load, "missing.txt")', BLOCKING) == BLOCKING_OUTPUT
    interrupt = "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); signal.pause()"
    shown = output(tmp_path, interrupt, BLOCKING).splitlines()
    assert shown == ['  File "PROGRAM", line 10, in <module>', f"    {interrupt}", "KeyboardInterrupt"]


def test_children_cancelled_by_a_failure_add_no_line(tmp_path: Path) -> None:
    body = """for i in range(10):
                entry = Entrypoint.from_callable(forever)
                await scope.launch(JobRequest(f"s{i}", SMALL, entrypoint=entry))
            await scope.run(nested, 2, resources=SMALL)"""
    shown = output(tmp_path, body)
    assert shown.replace("line 24", "line 21") == TREE_OUTPUT


def test_two_failures_for_two_reasons_are_both_shown(tmp_path: Path) -> None:
    body = f"""try:
                {LAUNCH.replace("            await", "                await")}
            except FileNotFoundError:
                pass
            raise ValueError("a second one")"""
    shown = output(tmp_path, body)
    assert "in scope 'run': job load failed (2 sub-exceptions)" in shown
    assert shown.count("No such file or directory: 'missing.txt'") == shown.count("ValueError: a second one") == 1
    assert shown.count("return open(path).read()") == 2
    assert "Trio nursery" not in shown


def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    shown = output(tmp_path, LAUNCH, FRAY_FULL_TRACEBACKS="1")
    assert "/fray/runtime/scope/scope.py" in shown
    assert shown.count("\n") > JOB_OUTPUT.count("\n") + 20
    interrupted = output(tmp_path, INTERRUPT, FRAY_FULL_TRACEBACKS="1")
    assert interrupted.startswith("Traceback (most recent call last):\n")


async def test_the_error_itself_is_short_so_that_every_printer_shows_the_same() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
            entry = fray.Entrypoint.from_callable(job_functions.fail, args=("x",))
            await (await scope.launch(JobRequest(name="boom", entrypoint=entry))).wait()
    (error,) = caught.value.exceptions
    assert {*frames(caught.value), *frames(error)} == {__file__, job_functions.__file__}
    assert frames(error)[-1] == job_functions.__file__
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "job_functions.py" in error.__cause__.text


def test_only_what_may_be_a_fault_of_fray_keeps_its_last_frames() -> None:
    refused, fault = raised(lambda: fray.ResourceConfig(memory="x")), raised(lambda: split_attempt(None))  # type: ignore[arg-type]
    for error in (refused, fault):
        shorten_traceback(error)
    package = f"{Path(fray.__file__).parent}/"
    assert not [name for name in frames(refused) if name.startswith(package)]
    assert frames(fault)[-1] == f"{package}model/ids.py"
    assert frames(refused)[0] == frames(fault)[0] == __file__


async def test_handlers_see_the_error_of_a_tree_of_jobs_as_one_of_this_process() -> None:
    caught: list[BaseException] = []
    try:
        async with (
            fray.open_cluster("local", logs=False) as cluster,
            cluster.open_scope("outer") as scope,
            cluster.open_scope("inner"),
        ):
            await scope.run(job_functions.fail_in_scope, "x")
    except* ValueError as group:
        caught += group.exceptions
    (error,) = caught
    remote = error.__cause__
    assert isinstance(remote, RemoteTraceback)
    assert [step.partition("-")[0] for step in remote.path] == ["driver", "fail_in_scope", "fail"]
    assert error.__notes__[0].startswith("raised in job fail-")
    again = pickle.loads(pickle.dumps(remote))
    assert (str(again), again.text, again.path) == (str(remote), remote.text, remote.path)
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    sent = load_error(dump_error(error))
    assert [frame.rpartition("/")[2] for frame in frames(sent)] == [frame.rpartition("/")[2] for frame in frames(error)]


async def test_a_group_of_the_users_own_keeps_its_form_causes_and_contexts() -> None:
    async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
        with pytest.raises(ExceptionGroup) as caught:
            await scope.run(job_functions.fail_with_group)
    group = caught.value
    assert group.message == "two of the user's"
    first, second = group.exceptions
    assert isinstance(first.__cause__, KeyError)
    assert isinstance(second.__context__, OSError)
    text = "".join(traceback.format_exception(group))
    assert text.count("in fail_with_group") == 6  # the group, two members, a cause, a context, and the top line
    assert all(line.startswith(("  |", "  +", "    |", "    +")) for line in text.splitlines()[-8:])


def test_lines_of_files_that_are_not_here_are_shown_and_none_of_other_files_of_that_name(tmp_path: Path) -> None:
    program = tmp_path / "remote_module.py"
    program.write_text("def work():\n    raise LookupError('far')\n")
    names: dict[str, Any] = {}
    exec(compile(program.read_text(), str(program), "exec"), names)
    data = dump_error(raised(names["work"]))
    linecache.clearcache()
    program.unlink()
    gone = load_error(data)
    assert "raise LookupError('far')" in "".join(traceback.format_exception(gone))
    linecache.clearcache()
    program.write_text("def work():\n    print('edited since')\n")
    edited = "".join(traceback.format_exception(load_error(data)))
    assert "raise LookupError('far')" in edited
    assert "edited since" not in edited


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its kind is the subject of the test
        call()
    return caught.value


def frames(error: BaseException) -> list[str]:
    """Return the files of its traceback."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


def test_an_error_that_came_in_an_instruction_without_a_line_is_sent_with_the_first_of_its_function() -> None:
    """Signals are handled between any two instructions, so an interrupt may come in one that a compiler added."""

    def work() -> None:
        raise RuntimeError("failed")

    function: Any = work
    code = function.__code__
    # One entry of the table of locations per eight units of code: 0xF8 with their number is "no location".
    units = len(code.co_code) // 2
    function.__code__ = code.replace(co_linetable=bytes(0xF8 | (min(8, units - at) - 1) for at in range(0, units, 8)))
    error = raised(function)
    assert traceback_entries(error)[-1].tb_lineno is None
    place = f"line {code.co_firstlineno}, in work"
    assert place in traceback_text(load_error(dump_error(error)))
    assert place in traceback_text(error)
