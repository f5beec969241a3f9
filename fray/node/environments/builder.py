"""Process that builds one environment: ``python -m fray.node.environments.builder``, its plan on stdin.

Invariants: at most one process runs uv for a key on this machine (it holds the exclusive lock), and no descendant
outlives the builder: it is a subreaper, it dies with its node, and on SIGTERM it ends all descendants before it exits.
A killed builder leaves a directory without the ready mark, which the next builder removes.

It writes JSON lines: ``{"say": line}`` any number of times, then ``{"ready": key}``, ``{"failed": message}``, or
``{"killed": step}``: a child of it was killed, which says nothing about the environment, so the node tries again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from attrs import frozen

from fray.model.text import byte_size_text
from fray.node.environments import overlay
from fray.node.environments.cache import Cache, EnvironmentLock, free_bytes
from fray.node.environments.recipe import (
    BuildPlan,
    Recipe,
    Step,
    conflict,
    failed_step,
    files,
    is_full,
    no_python,
    steps,
    uv_environ,
    without_credentials,
)
from fray.node.job_process.bootstrap import PRELOAD
from fray.node.linux.process_tree import (
    become_subreaper,
    die_with,
    end_descendants,
    set_title,
)

LOCK_RETRY_S = 0.02
_CHILD_KILLED = "exit status signal: 9 (SIGKILL)"
"""Part of uv's message about a child process that was killed."""


class BuildFailed(Exception):
    """The environment cannot be built; the message says why."""


class StepKilled(Exception):
    """A step was killed; another try may succeed."""


def main() -> NoReturn:
    plan = BuildPlan.from_json(sys.stdin.read())
    _set_up(plan.node_pid)
    code = 1
    try:
        code = _report(plan)
    finally:
        end_descendants()
        os._exit(code)


def _set_up(node_pid: int) -> None:
    set_title("fray-builder")
    become_subreaper()
    # Before the parent-death signal is requested, which is this one: uv's processes end first.
    signal.signal(signal.SIGTERM, _leave)
    die_with(node_pid, signal.SIGTERM)


def _leave(number: int, frame: object) -> NoReturn:
    # No exception is raised: SIGTERM may arrive anywhere, also where one would be caught.
    end_descendants()
    os._exit(128 + number)


def _report(plan: BuildPlan) -> int:
    try:
        build(plan)
    except BuildFailed as error:
        _send(failed=str(error))
    except StepKilled as error:
        _send(killed=str(error))
    except OSError as error:
        _send(failed=_os_failed(plan, error))
    else:
        _send(ready=plan.recipe.key)
        return 0
    return 1


def _send(**message: str) -> None:
    # All lines for the log pass here, so that it shows no credentials of a URL.
    message_out = {key: without_credentials(value) for key, value in message.items()}
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message_out) + "\n")
        sys.stdout.flush()


def say(line: str) -> None:
    _send(say=line)


def build(plan: BuildPlan) -> None:
    """Build the environment, unless another process has meanwhile. If it fails, its directory is removed.

    Raises:
        BuildFailed: the environment cannot be built.
        StepKilled: a step was killed.
    """
    cache, key = Cache(Path(plan.root)), plan.recipe.key
    lock = _acquire_lock(cache, key)
    if lock is None:
        say(f"{key} was built by another node of this machine")
        return
    with lock:
        lock.write_owner()
        if cache.remove(key):
            say(f"removed an unfinished {key}, left by a build that was killed")
        try:
            _build_environment(plan, cache, key)
        except BaseException:
            # Removed at once, and not by the next builder: a failed build may have filled the disk.
            cache.remove(key)
            raise


def _acquire_lock(cache: Cache, key: str) -> EnvironmentLock | None:
    """Return the exclusive lock, or None once the environment exists."""
    lock = cache.lock(key, exclusive=True)
    if lock is None:
        say(f"waiting for process {EnvironmentLock.read_owner(cache.lock_path(key))}, which builds {key}")
    while lock is None:
        # Waiting for the exclusive lock would also wait for the users of an environment that was built meanwhile: for
        # jobs, which may be waiting for this job. The shared lock is free as soon as no process builds.
        shared = cache.lock(key, exclusive=False, wait=True)
        assert shared is not None
        with shared:
            if cache.find(key) is not None:
                return None
        time.sleep(LOCK_RETRY_S)  # its builder was killed, and other waiting builders hold the shared lock, too
        lock = cache.lock(key, exclusive=True)
    if cache.find(key) is None:
        return lock
    lock.close()
    return None


def _build_environment(plan: BuildPlan, cache: Cache, key: str) -> None:
    recipe, directory = plan.recipe, cache.directory(key)
    directory.mkdir(mode=0o700)
    for name, text in files(recipe, overlay.constraints()).items():
        (directory / name).write_text(text)
    tool = UvRunner(directory, plan.workspace)
    for step in steps(recipe, str(directory), _interpreter(recipe, tool)):
        tool.run(step)
    _add_fray(recipe, directory, tool)
    cache.mark_ready(key, recipe.python, recipe.describe())


def _interpreter(recipe: Recipe, tool: UvRunner) -> str:
    if recipe.python == recipe.base.python:
        return recipe.base.interpreter
    code, lines = tool.call(Step(argv=("python", "find", "--no-project", recipe.python)))
    if code or not lines:
        raise BuildFailed(no_python(recipe))
    return lines[-1]


def _add_fray(recipe: Recipe, directory: Path, tool: UvRunner) -> None:
    """Add the node's Fray, in place of the project's if it has one: the node starts jobs in the format of its own."""
    venv = directory / "venv"
    # A project that requires Fray has installed one, which may be of another version.
    if overlay.is_installed(venv, recipe.python, "fray"):
        tool.run(Step(argv=("pip", "uninstall", "--python", f"{venv}/bin/python", "fray")))
    overlay.create(directory / "fray")
    overlay.add_path(venv, recipe.python, directory / "fray")
    # Imported once before the environment is marked as ready: a conflict fails the build, and not each job with a
    # traceback.
    names = [name.partition(":")[0] for name in PRELOAD]
    # -P: nothing must be imported from the current directory.
    command = [f"{venv}/bin/python", "-P", "-c", f"import {', '.join(names)}"]
    code, lines = tool.execute(command)
    if code:
        raise BuildFailed(conflict(code, lines))


@frozen
class UvRunner:
    """Run uv for one environment and report its output."""

    directory: Path
    workspace: str | None

    def run(self, step: Step) -> None:
        say(f"$ uv {' '.join(step.argv)}")
        code, lines = self.call(step, echo=True)
        if code:
            raise BuildFailed(self._with_disk_note(failed_step(step.title, code, lines)))

    def call(self, step: Step, *, echo: bool = False) -> tuple[int, list[str]]:
        command = [_uv(), *step.argv]
        where = self.workspace if step.in_workspace else None
        return self.execute(command, where, step.variables, echo=echo)

    def execute(
        self,
        command: list[str],
        where: str | None = None,
        variables: Mapping[str, str] | None = None,
        *,
        echo: bool = False,
    ) -> tuple[int, list[str]]:
        """Run a command. Return its exit code and all lines of its stdout and stderr.

        Raises:
            StepKilled: SIGKILL has ended it, or, as uv reports, a process of its own.
        """
        own_pid = os.getpid()
        with subprocess.Popen(
            command,
            cwd=where or self.directory,
            env={**uv_environ(os.environ), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # uv ends with the builder, however that ends. Safe after fork: this process has one thread.
            preexec_fn=lambda: die_with(own_pid),
            restore_signals=False,  # SIGXFSZ stays ignored: a file that grows too large is an error, not a crash
            text=True,
            errors="replace",
        ) as process:
            lines = []
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if echo:
                    say(lines[-1])
        # uv asks the interpreter, and builds packages, in child processes, and exits with 2 if one of them is killed.
        child_was_killed = process.returncode > 0 and any(_CHILD_KILLED in line for line in lines)
        if process.returncode == -signal.SIGKILL or child_was_killed:
            raise StepKilled(f"{Path(command[0]).name} {' '.join(command[1:3])}")
        return process.returncode, lines

    def _with_disk_note(self, message: str) -> str:
        return f"{message}\n{_disk_full_text(self.directory)}" if is_full(message) else message


def _uv() -> str:
    try:
        import uv
    except ImportError:
        raise BuildFailed(
            "uv, which builds environments, is not installed on the node: install the package `uv` where fray-node runs"
        ) from None
    return str(uv.find_uv_bin())


def _os_failed(plan: BuildPlan, error: OSError) -> str:
    message = f"cannot create its directory in {plan.root}: {error}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{message}\n{_disk_full_text(Path(plan.root))}" if full else message


def _disk_full_text(directory: Path) -> str:
    return (
        f"the disk is full: {byte_size_text(free_bytes(directory))} free at {directory}. Free some space there, or "
        "start fray-node with another --cache-dir (uv's own cache is at UV_CACHE_DIR)"
    )


if __name__ == "__main__":
    main()
