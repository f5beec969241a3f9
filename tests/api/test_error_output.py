"""Output on a terminal when a program on Fray fails: each failure once, with the frames of the program alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import fray
from fray import JobRequest
from fray.errors import RemoteTraceback
from fray.model.ids import split_attempt
from fray.runtime.tracebacks import shorten_traceback
from tests.support import job_functions

HEAD = """
import os, signal, threading, trio
import fray
from fray import Entrypoint, JobRequest, ResourceConfig

def load(path):
    return open(path).read()

async def nested(depth):
    async with fray.current_cluster().open_scope(f"at {depth}") as scope:
        fn, args = (nested, (depth - 1,)) if depth else (load, ("missing.txt",))
        return await scope.run(fn, *args)

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

JOB_OUTPUT = """\
  + Exception Group Traceback (most recent call last):
  |   File "PROGRAM", line 20, in <module>
  |     trio.run(main)
  |   File "TRIO", line N, in run
  |     raise runner.main_task_outcome.error
  |   File "PROGRAM", line 15, in main
  |     async with fray.open_cluster("local", logs=False) as cluster:
  |   File "PROGRAM", line 16, in main
  |     async with cluster.open_scope("run") as scope:
  | ExceptionGroup: in scope 'run' (1 sub-exception)
  +-+---------------- 1 ----------------
    | fray.errors.RemoteTraceback: traceback of the process in which it was raised:
    | Traceback (most recent call last):
    |   File "PROGRAM", line 7, in load
    |     return open(path).read()
    | FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'
    |
    | The above exception was the direct cause of the following exception:
    |
    | Traceback (most recent call last):
    |   File "PROGRAM", line 18, in main
    |     await (await scope.launch(JobRequest(name="load", entrypoint=entry))).wait()
    | FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'
    | raised in job load-ID on local
    +------------------------------------
"""
INTERRUPT_OUTPUT = """\
Traceback (most recent call last):
  File "PROGRAM", line 20, in <module>
    trio.run(main)
  File "TRIO", line N, in run
    raise runner.main_task_outcome.error
  File "PROGRAM", line 18, in main
    await trio.sleep(30)
KeyboardInterrupt
"""


def output(tmp_path: Path, body: str, **environ: str) -> str:
    """Return what the program prints: markers below a line left out, paths, ids and Trio's lines made equal."""
    program = tmp_path / "program.py"
    program.write_text(HEAD.replace("BODY", body))
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (1, -signal.SIGINT)
    text = re.sub(r"(?m)^[ |]*\^+\n", "", done.stdout + done.stderr)
    text = re.sub(r'"[^"]*/trio/_core/_run.py", line \d+', '"TRIO", line N', text)
    text = re.sub(r"(load|nested|job)-\w{12}\b", r"\1-ID", text)
    return re.sub(r"(?m)[ ]+$", "", text.replace(str(program), "PROGRAM"))


def test_a_job_that_fails_is_shown_once_with_the_lines_of_the_program(tmp_path: Path) -> None:
    assert output(tmp_path, LAUNCH) == JOB_OUTPUT


def test_an_interrupt_shows_where_the_program_waited(tmp_path: Path) -> None:
    assert output(tmp_path, INTERRUPT) == INTERRUPT_OUTPUT


def test_a_wrong_argument_is_shown_with_the_line_that_has_it(tmp_path: Path) -> None:
    shown = output(tmp_path, 'ResourceConfig(memory="4 gigs")').splitlines()
    assert len(shown) <= 16
    assert shown[-4:-1] == [
        '    |   File "PROGRAM", line 17, in main',
        '    |     ResourceConfig(memory="4 gigs")',
        "    | fray.errors.InvalidRequest: memory='4 gigs' is not a valid size: write a number of bytes or for example "
        "'512MB', '2GB'; at most 1152921504606846976",
    ]


def test_each_level_of_a_tree_of_jobs_adds_few_lines(tmp_path: Path) -> None:
    lengths = []
    for depth in range(3):
        shown = output(tmp_path, f"await scope.run(nested, {depth})")
        assert shown.count("in load\n") == 1, shown
        lengths.append(shown.count("\n"))
    assert lengths[2] - lengths[1] <= 28
    assert lengths[1] - lengths[0] <= 25


def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    shown = output(tmp_path, LAUNCH, FRAY_FULL_TRACEBACKS="1")
    assert "/fray/runtime/scope/scope.py" in shown
    assert shown.count("\n") > JOB_OUTPUT.count("\n") + 20


async def test_the_error_itself_is_short_so_that_every_printer_shows_the_same() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with fray.open_cluster("local", logs=False) as cluster, cluster.open_scope("run") as scope:
            entry = fray.Entrypoint.from_callable(job_functions.fail, args=("x",))
            await (await scope.launch(JobRequest(name="boom", entrypoint=entry))).wait()
    (error,) = caught.value.exceptions
    assert {*frames(caught.value), *frames(error)} == {__file__}
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "job_functions.py" in error.__cause__.text


def test_only_what_may_be_a_fault_of_fray_keeps_its_last_frames() -> None:
    refused, fault = raised(lambda: fray.ResourceConfig(memory="x")), raised(lambda: split_attempt(None))  # type: ignore[arg-type]
    for error in (refused, fault):
        shorten_traceback(error)
    assert not [name for name in frames(refused) if "/fray/" in name]
    assert frames(fault)[-1].endswith("/fray/model/ids.py")
    assert frames(refused)[0] == frames(fault)[0] == __file__


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its kind is the subject of the test
        call()
    return caught.value


def frames(error: BaseException) -> list[str]:
    """Return the files of its traceback."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
