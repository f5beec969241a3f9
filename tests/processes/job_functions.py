"""Entries for the jobs of these tests: what user code might do to a process tree. No test runs in this module.

Each is called in the process of an attempt as the runtime's ``main`` would be; arguments come as variables.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from fray.model.specs import AttemptSpec, EndReason, Outcome
from fray.net.codec import blob_id, to_json


def record(outcome_fd: int, outcome: Outcome, value: bytes = b"") -> None:
    with open(outcome_fd, "wb") as file:
        file.write(to_json(outcome).encode() + b"\n" + value)


def succeed(outcome_fd: int, value: bytes = b"") -> None:
    record(outcome_fd, Outcome(cause=EndReason.SUCCEEDED, value=blob_id(value) if value else None), value)


def dispatch(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Run the function that the job's name (before the first dash) says."""
    globals()[attempt_spec.spec.name.partition("-")[0]](attempt_spec, outcome_fd, control_fd)


_libc = ctypes.CDLL(None)
_PR_SET_DUMPABLE, _PR_SET_NAME, _PTRACE_TRACEME = 4, 15, 0


def wait_forever() -> NoReturn:
    while True:
        signal.pause()


def answer(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    succeed(outcome_fd, os.environ.get("VALUE", "42").encode())


def fill(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Succeed in a directory where one file cannot be written: by a full disk, or where a draft is, by a directory."""
    file = Path(attempt_spec.directory, attempt_spec.spec.env_vars["FILE"])
    file.mkdir() if file.suffix == ".new" else os.symlink("/dev/full", file)
    succeed(outcome_fd, b"42")


def describe(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """The world as the job sees it."""
    seen = {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "main": sys.modules["__main__"].__dict__.get("__file__"),
        "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "outcome_fd": outcome_fd,
        "control_fd": control_fd,
        "stdin": os.readlink("/proc/self/fd/0"),
        "sid": os.getsid(0),
        "pid": os.getpid(),
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "interval": sys.getswitchinterval(),
        "payload": attempt_spec.payload_path and open(attempt_spec.payload_path).read(),  # noqa: SIM115
        "interpreter_flag": sys.dont_write_bytecode,
        "imported": sorted(name for name in sys.modules if name.startswith("fray.")),
    }
    succeed(outcome_fd, json.dumps(seen).encode())


def chatter(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    print("first")
    print("warning", file=sys.stderr)
    subprocess.run(["sh", "-c", "echo from a child"], check=True)
    os.write(1, b"no newline")
    succeed(outcome_fd)


def flood(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    for number in range(int(os.environ["LINES"])):
        print(f"{number} " + "x" * 200)
    succeed(outcome_fd)


def murmur(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Ten lines and a piece; then, once a file exists, the rest of it and two more, the last without its newline."""
    for number in range(10):
        print(f"line {number}", flush=True)
    os.write(1, b"unfinished")
    if "AFTER" in os.environ:
        while not os.path.exists(os.environ["AFTER"]):
            time.sleep(0.01)
        os.write(1, b" and ended\nlate\nlast")
        open(os.environ["SAID"], "w").close()
    wait_forever()


def leave(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    print("oh no", file=sys.stderr, flush=True)
    os._exit(int(os.environ["CODE"]))


def shoot(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    wait_forever()


def half(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Killed in the middle of its result."""
    os.write(outcome_fd, to_json(Outcome(cause=EndReason.SUCCEEDED, value=blob_id(b"whole"))).encode() + b"\nwho")
    os.kill(os.getpid(), signal.SIGKILL)


def linger(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Says that it is done and never exits."""
    succeed(outcome_fd, b"done")
    threading.Thread(target=wait_in_thread).start()


def wait_in_thread() -> None:
    threading.Event().wait()


def obey(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Ends when it is cancelled."""
    print("ready", flush=True)
    assert os.read(control_fd, 1) == b"c"
    record(outcome_fd, Outcome(cause=EndReason.STOPPED, message="cancelled"))


def finish(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Is cancelled and succeeds all the same."""
    print("ready", flush=True)
    os.read(control_fd, 1)
    succeed(outcome_fd, b"in time")


def deaf(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Hears no cancel, but SIGTERM."""
    print("ready", flush=True)
    wait_forever()


def stubborn(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Hears neither."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    wait_forever()


def scatter(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Leaves a child, a grandchild in its own session, and a daemon; then ends."""
    _child(wait_forever)
    _child(lambda: (os.setsid(), _child(wait_forever), wait_forever()))
    _daemon()
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    if "FREEZER" in os.environ:
        _freeze(sleeper.pid, os.environ["FREEZER"])
    succeed(outcome_fd)


def hide(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Leaves processes that have no parent, no mark, no descriptor, hear no signal, and cannot be looked into: one that
    sleeps, one that is stopped, one that is stopped by its tracer, which is stopped."""
    for body in (wait_forever, _stop, _trace):
        pid = _child(lambda body=body: (os.setsid(), _child(lambda: (_strip(), body()))))  # type: ignore[misc]
        os.waitpid(pid, 0)
    print("ready", flush=True)
    wait_forever()


def _strip() -> None:
    os.chdir("/")
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, b"hidden", 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    os.closerange(0, 1000)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _trace() -> None:
    _child(lambda: (_libc.ptrace(_PTRACE_TRACEME, 0, 0, 0), _stop()))
    _stop()


def _freeze(pid: int, group: str) -> None:
    for file, text in (("cgroup.procs", str(pid)), ("freezer.state", "FROZEN")):
        with open(f"{group}/{file}", "w") as control:
            control.write(text)


def sweep_shortly() -> None:
    """Shorten the time limits of shims; run in the zygote."""
    from fray.node.shim import event_loop

    event_loop.SWEEP_S = 0.3


def _child(body: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def _daemon() -> None:
    """The old way: fork, setsid, fork, let the parents go."""
    pid = _child(lambda: (os.setsid(), _child(wait_forever)))
    os.waitpid(pid, 0)


def storm(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Forks, changes sessions and daemonizes without end, and moves on while it does; some children run programs."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(int(os.environ.get("HOPPERS", "3"))):
        _child(_hop)
    for number in range(1 << 30):
        if number == 3:
            print("ready", flush=True)
        _child((_leaf, _program, _leaf, _bare_program)[number % 4])
        time.sleep(0.02)


def _leaf() -> None:
    os.setsid()
    _child(lambda: time.sleep(1000))


def _program() -> None:
    os.setsid()
    os.execv("/bin/sleep", [f"{os.environ['FRAY_NODE_STATE']}/{os.environ['FRAY_JOB_NAME']}", "1000"])


def _bare_program() -> None:
    """Leave a process without a mark in its environment."""
    os.setsid()
    os.execve("/bin/sleep", [f"{os.environ['FRAY_NODE_STATE']}/{os.environ['FRAY_JOB_NAME']}", "1000"], {})


def _hop() -> NoReturn:
    """One process that is always another: each forks the next and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        os.setpgid(0, 0)
        if os.fork() != 0:
            os._exit(0)
        time.sleep(0.001)


def dial(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Tells a test that user code runs."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["DIAL"])
    succeed(outcome_fd)


def inside(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Print how a process tree sees the machine, from within."""
    others = [name for name in os.listdir("/proc") if name.isdigit()]
    seen = {"pid": os.getpid(), "ppid": os.getppid(), "others": sorted(map(int, others)), "ns": _own_namespace()}
    print(json.dumps(seen), flush=True)
    _daemon()
    os.read(control_fd, 1)
    succeed(outcome_fd)


def _own_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def refuse_namespaces() -> None:
    """Run in the zygote: a machine that gives none."""
    from fray.node.zygotes import zygote

    zygote.namespace_error = lambda: "not on this machine"  # type: ignore[assignment]


def hog(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Takes memory in a child, 8 MB at a time, and holds it."""
    pid = _child(_take_memory)
    os.waitpid(pid, 0)
    os._exit(3)


def _take_memory() -> None:
    held = []
    while len(held) < int(os.environ.get("PIECES", "200")):
        held.append(bytearray(os.urandom(1024) * 8 * 1024))
        time.sleep(0.005)
    wait_forever()


def share(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Many processes that share what one has written."""
    held = bytearray(os.urandom(1024) * 60 * 1024)
    for _ in range(6):
        _child(wait_forever)
    time.sleep(0.4)
    succeed(outcome_fd, str(len(held)).encode())


def burn(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Uses CPU time in a grandchild that its parent does not wait for."""
    read, write = os.pipe()
    os.waitpid(_child(lambda: _child(_spin)), 0)
    os.close(write)
    os.read(read, 1)
    succeed(outcome_fd)


def _spin() -> None:
    deadline = time.process_time() + 0.2
    while time.process_time() < deadline:
        pass


def pinned(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    child = subprocess.run(["nproc"], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    seen = {"cpus": sorted(os.sched_getaffinity(0)), "child": int(child.stdout), "environ": dict(os.environ)}
    succeed(outcome_fd, json.dumps(seen).encode())
