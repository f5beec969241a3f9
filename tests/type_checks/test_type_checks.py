"""Errors of mypy and pyright in lines of user code that are right or wrong: each with its line and its words."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fray import ActorHost, Scope, child, mypy_plugin
from fray.api.launch_options import ActorOptions, GroupOptions, RunOptions

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RIGHT, ATTRIBUTES, WRONG = "right_lines.py", "attribute_calls.py", "wrong_lines.py"
EXPECTED = re.compile(r"# (mypy|pyright): (.*?)(?= # pyright:|$)")


def expected(checker: str, names: tuple[str, ...]) -> dict[tuple[str, int], str]:
    """Return the words expected at each line."""
    return {
        (name, number): text
        for name in names
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1)
        for who, text in EXPECTED.findall(line)
        if who == checker and not line.startswith('"""')
    }


def differences(found: dict[tuple[str, int], str], wanted: dict[tuple[str, int], str]) -> list[str]:
    """Return a line for each place at which a checker says something else than expected."""
    return [
        f"{name}:{line}: expected {wanted.get((name, line), 'no error')!r}, got {found.get((name, line), 'no error')!r}"
        for name, line in sorted({*found, *wanted})
        if (name, line) not in wanted or wanted[name, line] not in found.get((name, line), "")
    ]


def run_mypy(tmp_path: Path, names: tuple[str, ...], plugins: str) -> dict[tuple[str, int], str]:
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = True\nexplicit_package_bases = True\ncache_dir = {tmp_path}\n{plugins}\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-error-summary"]
    done = subprocess.run(
        [*command, *(f"tests/type_checks/{name}" for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr}"
    found: dict[tuple[str, int], str] = {}
    for path, line, text in re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        key = Path(path).name, int(line)
        found[key] = f"{found.get(key, '')}{text}\n"
    return found


def run_pyright(names: tuple[str, ...]) -> dict[tuple[str, int], str]:
    # The engine and Node.js of the pinned packages: nothing is downloaded.
    variables = {**os.environ, "PYRIGHT_PYTHON_GLOBAL_NODE": "off", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    variables["PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT"] = "1"
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, *(f"tests/type_checks/{name}" for name in names)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr}"
    found: dict[tuple[str, int], str] = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            key = Path(each["file"]).name, each["range"]["start"]["line"] + 1
            found[key] = f"{found.get(key, '')}{each['message']}\n"
    return found


@pytest.mark.within(120)
def test_mypy_with_the_plugin_reports_each_wrong_line_and_no_right_one(tmp_path: Path) -> None:
    names = (RIGHT, ATTRIBUTES, WRONG)
    found = run_mypy(tmp_path, names, "plugins = fray.mypy_plugin")
    assert not (wrong := differences(found, expected("mypy", names))), "\n" + "\n".join(wrong)


@pytest.mark.full
@pytest.mark.within(120)
def test_mypy_without_the_plugin_accepts_the_right_lines(tmp_path: Path) -> None:
    assert run_mypy(tmp_path, (RIGHT,), "") == {}


@pytest.mark.full
@pytest.mark.within(120)
def test_pyright_reports_the_wrong_lines_that_it_can_see_and_no_right_one() -> None:
    pytest.importorskip("pyright")
    names = (RIGHT, WRONG)
    found = run_pyright(names)
    assert not (wrong := differences(found, expected("pyright", names))), "\n" + "\n".join(wrong)


def test_typed_options_are_those_of_the_functions() -> None:
    def options_of(function: object) -> set[str]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}

    assert set(ActorOptions.__annotations__) == options_of(Scope.create_actor)
    assert set(GroupOptions.__annotations__) | {"count"} == options_of(Scope.create_actor_group)
    assert set(RunOptions.__annotations__) == options_of(Scope.run) == mypy_plugin.RUN_OPTIONS
    assert options_of(Scope.create_actor) | options_of(Scope.create_actor_group) == mypy_plugin.ACTOR_OPTIONS
    assert options_of(ActorHost.create_actor) | options_of(ActorHost.create_actors) == mypy_plugin.HOSTED_OPTIONS
    assert options_of(child) == mypy_plugin.CHILD_OPTIONS
