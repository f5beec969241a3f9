"""Forking the process of the job from its shim."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable
from typing import NoReturn

from attrs import Factory, evolve, frozen

from fray.model.specs import AttemptSpec, EntryKind, JobAccount
from fray.net.codec import to_json
from fray.net.memory_protection import allow_inspection
from fray.node.accounts.switch import become, give, set_environ
from fray.node.job_process.bootstrap import (
    ProcessSpec,
    cold_command,
    job_variables,
    name_process,
    needs_cold_start,
    refuse,
    working_directory,
)
from fray.node.linux.process_tree import die_with
from fray.node.prepare import PreparedEnvironment


@frozen(kw_only=True)
class ShimConfig:
    """Start message of a shim."""

    attempt_spec: AttemptSpec
    entry: str
    offered: dict[str, int] = Factory(dict)
    """Number of accelerators of each kind on the node."""
    prepared: PreparedEnvironment = Factory(PreparedEnvironment)
    cpus: tuple[int, ...] = ()
    """CPUs it may run on; empty: any."""


@frozen(kw_only=True)
class SpawnedProcess:
    """The job's main process as its shim holds it. All descriptors are the shim's ends."""

    pid: int
    pidfd: int
    out_fd: int
    err_fd: int
    outcome_fd: int
    control_fd: int


def spawn(start: ShimConfig) -> SpawnedProcess | ProcessSpec:
    """Fork the job.

    Returns a `SpawnedProcess` in the shim and a `ProcessSpec` in a job that runs Python in the forked interpreter.
    Other jobs exec.

    Raises:
        OSError: the machine has no process or descriptor left.
    """
    out, err = os.pipe(), os.pipe()
    outcome, control = _lines_into_container(start.attempt_spec) if start.prepared.image else (os.pipe(), os.pipe())
    if start.attempt_spec.account is not None:
        _give_to_account(start.attempt_spec, start.attempt_spec.account, (out[0], err[0]))
    shim = os.getpid()
    # The shim has one thread, so fork is safe: no lock is held by a thread that the child lacks.
    pid = os.fork()
    if pid == 0:
        return _become_job(start, shim, (out[1], err[1]), outcome[1], control[0])
    for descriptor in (out[1], err[1], outcome[1], control[0]):
        os.close(descriptor)
    # The shim must never block on a job that does not read its requests; what does not fit is dropped.
    os.set_blocking(control[1], False)
    return SpawnedProcess(
        pid=pid, pidfd=os.pidfd_open(pid), out_fd=out[0], err_fd=err[0], outcome_fd=outcome[0], control_fd=control[1]
    )


def _give_to_account(attempt_spec: AttemptSpec, account: JobAccount, pipes: tuple[int, int]) -> None:
    """Give the job its directories, and the pipes it prints into: programs open /dev/stderr by its name."""
    for directory in (attempt_spec.directory, attempt_spec.sockets):
        give(directory, account)
    for pipe in pipes:
        os.fchown(pipe, account.uid, account.gid)


def _lines_into_container(attempt_spec: AttemptSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return named pipes for outcome and control: no descriptor can be inherited by a container."""
    from fray.node.containers.engine import CONTROL, OUTCOME

    return _named_pipe(f"{attempt_spec.directory}/{OUTCOME}"), _named_pipe(f"{attempt_spec.directory}/{CONTROL}")


def _named_pipe(path: str) -> tuple[int, int]:
    os.mkfifo(path, 0o600)
    # Opening an end of a named pipe blocks until the other is open: so the reader is opened without blocking, first.
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    write = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.set_blocking(read, True)
    return read, write


# In the child --------------------------------------------------------------------------------------------------------


def _become_job(start: ShimConfig, shim: int, stdio: tuple[int, int], outcome_fd: int, control_fd: int) -> ProcessSpec:
    try:
        _detach(shim, stdio, (outcome_fd, control_fd))
        allow_inspection()  # captures of its stacks, and the user's debuggers
        body = ProcessSpec(
            attempt_spec=start.attempt_spec,
            entry=start.entry,
            variables=job_variables(start.attempt_spec, start.offered, start.prepared, start.cpus),
            cwd=start.prepared.cwd,
            sys_path=start.prepared.sys_path,
            at_home=not start.prepared.interpreter,
            outcome_fd=outcome_fd,
            control_fd=control_fd,
        )
        name_process(start.attempt_spec.spec.name)
        if start.cpus:
            # Before any exec or fork, which inherit it.
            os.sched_setaffinity(0, start.cpus)
        # Before the other kinds: in a container the engine's client runs the program, or the image's Python.
        if start.prepared.image:
            _run_container(body, start.prepared)
        if start.attempt_spec.account is not None:
            _change_account(start.attempt_spec.account, shim)
        if start.attempt_spec.spec.entry is EntryKind.BINARY:
            _run_program(body, start.prepared.argv)
        if start.prepared.starts_cold or needs_cold_start(os.environ, body.variables):
            _start_cold(body, start.prepared.interpreter or sys.executable)
        return body
    except BaseException:  # noqa: BLE001 - the shim's own code must never continue in the child
        refuse(outcome_fd, f"setting up the process failed:\n{traceback.format_exc()}")
        os._exit(1)


def _change_account(account: JobAccount, shim: int) -> None:
    """Leave root, before anything of the user is looked at: its paths, its variables, its code."""
    become(account)
    set_environ(os.environ, account)
    die_with(shim)  # the kernel forgets it when the uid changes


def _detach(shim: int, stdio: tuple[int, int], keep: tuple[int, int]) -> None:
    # A session of its own: Ctrl-C in a driver's terminal does not reach it, and a process group to signal a program by.
    os.setsid()
    # As early as possible: a shim that is killed in this moment takes the job along. PDEATHSIG covers this process
    # only; the zygote or the node kills its descendants.
    die_with(shim)
    reset_signals()
    # An empty standard input: a job that reads from it ends instead of waiting for ever.
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *stdio), (0, 1, 2), strict=True):
        os.dup2(source, target)
    close_all_but(keep)


def reset_signals() -> None:
    """Restore the signal handlers of a fresh interpreter."""
    signal.set_wakeup_fd(-1)
    # The zygote ignores or handles these, and exec passes ignored signals on.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor from 3 up, except these."""
    low = 3
    for descriptor in sorted(keep):
        os.closerange(low, descriptor)
        low = descriptor + 1
    # 1 << 20 is the kernel's default for the largest number of descriptors (fs.nr_open).
    os.closerange(low, 1 << 20)


def _run_program(body: ProcessSpec, before: tuple[str, ...]) -> NoReturn:
    argv = [*before, *body.attempt_spec.spec.argv]
    # Python ignores the first two. Passed on by exec, that would keep ``yes | head`` running for ever.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(working_directory(body.attempt_spec, body.cwd))
        environ = {**os.environ, **body.variables}
        # In the PATH of the job, not of the zygote. execve itself searches none.
        program = shutil.which(argv[0], path=environ.get("PATH", os.defpath)) or argv[0]
        # Outcome and control pipe close with exec: a program leaves no record unless this call fails.
        os.execve(program, argv, environ)
    except OSError as error:
        refuse(body.outcome_fd, f"cannot run {argv[0]!r}: {error.strerror}")
        os._exit(127)


def _run_container(body: ProcessSpec, prepared: PreparedEnvironment) -> NoReturn:
    """Execute the engine's client, with the job's command in the container."""
    from fray.node.containers.engine import TICKET, run_command

    attempt_spec = body.attempt_spec
    user, cwd = f"{os.getuid()}:{os.getgid()}", working_directory(body.attempt_spec, body.cwd)
    # O_EXCL: not through a link, since the directory may belong to an account already.
    ticket = os.open(f"{attempt_spec.directory}/{TICKET}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    # Secrets are in no file: they reach the container as variables, by name on the command line.
    with open(ticket, "w") as file:
        file.write(to_json([to_json(evolve(attempt_spec, secrets={})), cwd, list(body.sys_path)]))
        if attempt_spec.account is not None:
            user = f"{attempt_spec.account.uid}:{attempt_spec.account.gid}"
            os.fchown(ticket, attempt_spec.account.uid, attempt_spec.account.gid)
    # The client holds both pipes open as long as it runs, so that neither ends before the container does.
    for descriptor in (body.outcome_fd, body.control_fd):
        os.set_inheritable(descriptor, True)
    # The node's PATH means nothing in the image; only one that the job itself sets is passed.
    variables = {name: value for name, value in body.variables.items() if name not in ("PATH", "VIRTUAL_ENV")}
    own_path = body.attempt_spec.spec.env_vars.get("PATH")
    variables |= {} if own_path is None else {"PATH": own_path}
    variables_file = ""
    if attempt_spec.account is not None:
        # The client is root's, and reads variables itself (DOCKER_HOST, LD_PRELOAD): it must not have the job's.
        variables_file, variables = _variables_file(body, variables), {}
    command = run_command(
        attempt_spec,
        prepared,
        entry=body.entry,
        cwd=cwd,
        variables=variables,
        user=user,
        variables_file=variables_file,
    )
    try:
        os.execve(command[0], command, {**os.environ, **variables})
    except OSError as error:
        refuse(body.outcome_fd, f"cannot run {command[0]!r}: {error.strerror}")
        os._exit(127)


def _variables_file(body: ProcessSpec, variables: dict[str, str]) -> str:
    """Return the path of a file in memory with the variables, which the engine's client inherits."""
    for name, value in variables.items():
        if "\n" in value:
            refuse(
                body.outcome_fd,
                f"variable {name!r} has several lines, which a container cannot get on a node with --job-uids: pass "
                "it in a file, or encoded",
            )
            os._exit(1)
    descriptor = os.memfd_create("variables", 0)
    os.write(descriptor, os.fsencode("".join(f"{name}={value}\n" for name, value in variables.items())))
    return f"/proc/self/fd/{descriptor}"


def _start_cold(body: ProcessSpec, interpreter: str) -> NoReturn:
    # The spec has the attempt's key and its secrets: every user sees a command line, and a file would outlive a crash.
    spec_fd = os.memfd_create("attempt_spec", 0)
    os.write(spec_fd, to_json(body.attempt_spec).encode())
    os.lseek(spec_fd, 0, os.SEEK_SET)
    for descriptor in (body.outcome_fd, body.control_fd):
        os.set_inheritable(descriptor, True)
    command = cold_command(body, spec_fd, interpreter)
    os.execve(command[0], command, {**os.environ, **body.variables})
