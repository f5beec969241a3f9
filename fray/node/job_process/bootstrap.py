"""Set-up of an attempt's process, from a bare process to the call of the runtime's ``main``.

Warm starts (forked by the shim from what the zygote imported), cold starts (a new interpreter, because the job sets
variables that are read at exec) and containers meet in `run_entrypoint`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from attrs import evolve, frozen

from fray.model.monitoring.progress_protocol import PIPE, VARIABLE
from fray.model.specs import AttemptSpec, EndReason, Outcome
from fray.net.codec import from_json, to_json
from fray.net.switch_interval import SWITCH_INTERVAL_S
from fray.node.job_process.gang_variables import framework_variables, own_variables
from fray.node.linux.process_tree import set_title
from fray.node.prepare import PreparedEnvironment
from fray.node.resources.cpu_pinning import thread_variables
from fray.node.resources.device_variables import device_variables

ENTRY = "fray.runtime.__main__:main"
PRELOAD = ("fray.runtime.__main__", "fray:load", "fray.runtime.process.warmup:warm_up")
"""Modules that a zygote imports, and functions it calls, once for all jobs."""
IDLE_PRELOAD = ("fray.blocking", "fray.v2")
"""Modules that a zygote imports when it has been idle: many jobs use them, and no start of a node waits for them."""
WARM_AMONG_MACHINES = ("fray.net.transports.tls_listener:warm_up",)
"""Functions that a zygote calls besides where connections are TCP."""
_INSTALLED = re.compile(r"/(site-packages|dist-packages)(/|$)|/lib(64)?/python[\d.]+(\.zip|/lib-dynload)?$")
_READ_AT_EXEC = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")


@frozen(kw_only=True)
class ProcessSpec:
    """Complete description of an attempt's process."""

    attempt_spec: AttemptSpec
    entry: str
    """Entry point ``module:function``, called as ``function(attempt_spec, outcome_fd, control_fd)``."""
    variables: dict[str, str]
    """Environment variables besides the node's."""
    cwd: str | None = None
    """Working directory; default: the author's, if it exists."""
    sys_path: tuple[str, ...] = ()
    """Entries in front of all others."""
    at_home: bool = True
    """True if it runs in the node's own environment."""
    outcome_fd: int
    """Descriptor for the job's outcome: ``to_json(outcome)``, a newline, the bytes of the value if there is one."""
    control_fd: int
    """Descriptor for requests to the job: ``b"c"`` cancel, ``b"p"`` preemption notice, ``b"t"`` write the tasks."""


# The environment -----------------------------------------------------------------------------------------------------


def job_variables(
    attempt_spec: AttemptSpec,
    offered: Mapping[str, int] | None = None,
    prepared: PreparedEnvironment | None = None,
    cpus: Iterable[int] = (),
) -> dict[str, str]:
    """Return what the environment of an attempt has besides the node's.

    Later ones win: variables of the cluster; of granted CPUs and devices, and of the gang for frameworks; of the
    prepared environment; for traces; of the job and its secrets; fixed ones; Fray's own.

    Args:
        offered: number of accelerators of each kind on the node; a job sees only those it was granted.
        cpus: those it is pinned to.
    """
    ready = prepared or PreparedEnvironment()
    inherited = {**os.environ, **attempt_spec.cluster_vars}
    # The job's variables win over those suggested to frameworks: an author who sets MASTER_PORT means it. The suggested
    # ones win over the node's own: what a node inherited by chance must not break a gang.
    granted = {**thread_variables(cpus, inherited), **device_variables(attempt_spec.devices, offered or {})}
    suggested = {**attempt_spec.cluster_vars, **granted, **framework_variables(attempt_spec), **ready.variables}
    return {
        **suggested,
        **attempt_spec.spec.trace_vars,
        **attempt_spec.spec.env_vars,
        **attempt_spec.secret_vars(),
        **ready.fixed_variables,
        **_fray_variables(attempt_spec),
    }


def working_directory(attempt_spec: AttemptSpec, prepared: str | None) -> str:
    """Return where the job starts: as prepared, else the author's directory, else the attempt's own."""
    cwd = prepared or attempt_spec.spec.cwd
    # The author's directory exists on the driver's machine, and seldom on others; it may be closed to an account.
    usable = cwd and os.path.isdir(cwd) and os.access(cwd, os.X_OK)
    return cwd if cwd and usable else attempt_spec.directory or "."


def _fray_variables(attempt_spec: AttemptSpec) -> dict[str, str]:
    return {
        "FRAY_JOB_ID": attempt_spec.spec.job_id,
        "FRAY_JOB_NAME": attempt_spec.spec.name,
        "FRAY_NAMESPACE": attempt_spec.spec.namespace,
        "FRAY_CLUSTER_ADDRESS": attempt_spec.controller,
        "FRAY_ATTEMPT_ID": attempt_spec.attempt_id,
        "FRAY_NODE": attempt_spec.node,
        "FRAY_JOB_INDEX": str(attempt_spec.spec.index),
        "FRAY_USER": attempt_spec.spec.user,
        **own_variables(attempt_spec),
        **({VARIABLE: f"{attempt_spec.directory}/{PIPE}"} if attempt_spec.directory else {}),
    }


def needs_cold_start(base: Mapping[str, str], env_vars: Mapping[str, str]) -> bool:
    """Return whether the job changes a variable that a running interpreter has already read."""
    # The loader reads LD_*, the interpreter PYTHON* and malloc its own once, at exec: a fork of the zygote would ignore
    # them.
    return any(key.startswith(_READ_AT_EXEC) and base.get(key) != value for key, value in env_vars.items())


# Entry point ---------------------------------------------------------------------------------------------------------


def run_entrypoint(body: ProcessSpec) -> NoReturn:
    """Set up this process, call the entry point, and exit. Earlier failures are recorded as `EndReason.ENVIRONMENT`."""
    try:
        main = _set_up_process(body)
    except Exception:  # noqa: BLE001 - user modules may raise anything while they are imported
        refuse(body.outcome_fd, f"the process could not be set up:\n{traceback.format_exc(limit=-8)}")
        os._exit(1)
    code = 1
    try:
        code = _exit_code(lambda: main(body.attempt_spec, body.outcome_fd, body.control_fd))
        _leave()
    finally:
        # os._exit and not sys.exit: the calling frames are those of the zygote.
        os._exit(code)


def _exit_code(run: Callable[[], None]) -> int:
    """Return what the interpreter would exit with after ``run``."""
    try:
        run()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - nothing is above this frame
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _leave() -> None:
    """Shut down without tearing down all modules, which costs 10 ms and copies their memory."""
    # As the interpreter does at its end: threads are waited for, then the exit hooks run.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def refuse(outcome_fd: int, message: str) -> None:
    """Record that user code was never reached."""
    os.write(outcome_fd, to_json(Outcome(cause=EndReason.ENVIRONMENT, message=message)).encode() + b"\n")
    os.close(outcome_fd)


def _set_up_process(body: ProcessSpec) -> Callable[[AttemptSpec, int, int], None]:
    spec = body.attempt_spec.spec
    _open_stdio()
    os.environ.update(body.variables)
    # The C library reads TZ once, in the zygote.
    time.tzset()
    os.chdir(working_directory(body.attempt_spec, body.cwd))
    sys.path[:0] = [entry for entry in body.sys_path if entry not in sys.path]
    _extend_path(spec.sys_path if body.at_home else own_code(spec.sys_path), spec.cwd)
    sys.argv = [spec.name]
    # An empty one: pickles that refer to ``__main__`` must not find the zygote's or the shim's.
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The zygote forks with the collector off.
    gc.enable()
    return resolve(body.entry)


def _open_stdio() -> None:
    """Open text streams: the inherited ones are as the zygote's launcher left them, block-buffered or absent."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _line_buffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_buffered(2)  # type: ignore[misc]


def _line_buffered(descriptor: int) -> Any:
    # By line, so that each print can be read at once, and never an error for what cannot be encoded.
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _extend_path(entries: Iterable[str], cwd: str | None) -> None:
    for entry in entries:
        path = entry or cwd or ""
        if path and path not in sys.path and os.path.exists(path):
            sys.path.append(path)


def own_code(entries: Iterable[str]) -> list[str]:
    """Return the entries without packages of the author's environment and interpreter.

    A job that asked for an environment has that one alone, also on the author's machine.
    """
    return [entry for entry in entries if not _INSTALLED.search(entry)]


def resolve(entry: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names."""
    module, _, name = entry.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def name_process(name: str) -> None:
    """Show the job's name in ``ps``, and make the kernel prefer it to its shim when memory runs out."""
    set_title(f"fray:{name}")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "rb+", buffering=0) as file:
        score = int(file.read())
        file.seek(0)
        # Raising is allowed without privileges. Were the shim killed instead, it could not report the cause.
        file.write(b"%d" % max(score, 300))


# Cold ----------------------------------------------------------------------------------------------------------------


def cold_command(body: ProcessSpec, spec_fd: int, interpreter: str) -> list[str]:
    """Return the command line of a new interpreter for ``body``; the attempt spec is passed by descriptor."""
    descriptors = (spec_fd, body.outcome_fd, body.control_fd)
    place = [*(["--cwd", body.cwd] if body.cwd else []), *(f"--path={entry}" for entry in body.sys_path)]
    place += [] if body.at_home else ["--abroad"]
    # -P elsewhere: nothing must be imported from the zygote's directory.
    program = [interpreter, *([] if body.at_home else ["-P"]), "-m", "fray.node.job_process.bootstrap"]
    return [*program, body.entry, *map(str, descriptors), *place]


def main() -> None:
    """Run the process of a cold start."""
    parser = argparse.ArgumentParser(
        prog="fray.node.job_process.bootstrap", description="runs the process of one attempt"
    )
    parser.add_argument("entry")
    parser.add_argument("fds", nargs=3, type=int)
    parser.add_argument("--cwd")
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--abroad", action="store_true")
    arguments = parser.parse_args()
    spec_fd, outcome_fd, control_fd = arguments.fds
    with open(spec_fd, encoding="utf-8") as file:
        attempt_spec = from_json(AttemptSpec, file.read())
    for descriptor in (outcome_fd, control_fd):
        # Programs that the job executes must not hold the outcome pipe open.
        os.set_inheritable(descriptor, False)
    run_entrypoint(
        ProcessSpec(
            attempt_spec=attempt_spec,
            entry=arguments.entry,
            variables={},
            cwd=arguments.cwd,
            sys_path=tuple(arguments.path),
            at_home=not arguments.abroad,
            outcome_fd=outcome_fd,
            control_fd=control_fd,
        )
    )


def enter_from(directory: str, entry: str) -> NoReturn:
    """Run the process in a container: what others get by descriptor is in the attempt's directory."""
    path = f"{directory}/attempt.json"
    with open(path, encoding="utf-8") as file:
        text, cwd, sys_path = json.load(file)
    # The spec has the attempt's key, and the job may copy or show its directory.
    os.unlink(path)
    attempt_spec = from_json(AttemptSpec, text)
    known = {name: os.environ[key] for key, name in attempt_spec.spec.secrets.items() if key in os.environ}
    run_entrypoint(
        ProcessSpec(
            attempt_spec=evolve(attempt_spec, secrets=known),  # they are in no file; errors must not show them either
            entry=entry,
            variables={},
            cwd=cwd,
            sys_path=tuple(sys_path),
            at_home=False,
            outcome_fd=os.open(f"{directory}/outcome", os.O_WRONLY | os.O_CLOEXEC),
            control_fd=os.open(f"{directory}/control", os.O_RDONLY | os.O_CLOEXEC),
        )
    )


if __name__ == "__main__":
    from fray.node.job_process import bootstrap

    bootstrap.main()
