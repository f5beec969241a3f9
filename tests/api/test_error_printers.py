"""Output of pytest, rich, IPython and logging for an error of a job: the frames of the program alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging
import fray.blocking as fray

def load(path):
    return open(path).read()

def test_program():
    with fray.open_cluster("local", logs=False) as cluster:
        with cluster.open_scope("run") as scope:
            WAIT

def caught():
    try:
        test_program()
    except Exception as error:
        return error
"""
GROUP = 'scope.run(load, "missing.txt")'
ALONE = """try:
                scope.run(load, "missing.txt")
            except OSError as error:
                outside = error
        raise outside"""
PRINTERS = {
    "python": "import traceback; traceback.print_exception(caught())",
    "logging": "error = caught(); logging.error('failed', exc_info=error)",
    "rich": """from rich.console import Console
from rich.traceback import Traceback
error = caught()
shown = Traceback.from_exception(type(error), error, error.__traceback__, extra_lines=0, width=150)
Console(width=150).print(shown)""",
    "IPython": """from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell(colors="nocolor")
shell.push({"run": test_program})
shell.run_cell("run()")""",
}


def printed(tmp_path: Path, wait: str, printer: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("WAIT", wait) + PRINTERS.get(printer, ""))
    command = [sys.executable, str(program)]
    if printer == "pytest":
        program = program.rename(tmp_path / "test_program.py")
        # Without this project's configuration.
        command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    return done.stdout + done.stderr


@pytest.mark.parametrize("wait", [GROUP, ALONE], ids=["group", "alone"])
@pytest.mark.parametrize("printer", ["logging", "rich", "IPython", "pytest"])
def test_every_printer_shows_the_frames_of_the_program_alone(tmp_path: Path, printer: str, wait: str) -> None:
    if printer == "IPython" and importlib.util.find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
    shown = printed(tmp_path, wait, printer)
    assert re.search(r"/(fray|trio|outcome)/", shown) is None, shown
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'missing.txt'" in shown
    assert "return open(path).read()" in shown
    if wait is GROUP:
        assert re.search(r"in scope 'run': job load-\w{6} failed \(1 sub-exception\)", shown)
        assert "Trio nursery" not in shown


def test_logging_shows_what_python_shows_and_the_message(tmp_path: Path) -> None:
    by_python = printed(tmp_path, GROUP, "python").splitlines()
    by_logging = printed(tmp_path, GROUP, "logging").splitlines()
    assert len(by_python) <= 25
    assert len(by_logging) == len(by_python) + 1
