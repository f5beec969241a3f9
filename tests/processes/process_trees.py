"""The processes of `process_tree_program.py`, looked at and killed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import define, field

from fray.node.job_process.inherited_environ import STATE_MARK
from fray.node.linux.process_tree import end_all, has_mark

TREE = Path(__file__).with_name("process_tree_program.py")
ROLES = ("driver", "unrelated", "node", "zygote", "shim")
LIMIT_S = 1.0 * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
"""One second, on a machine that has not more to do than it can."""
READY_S = 90.0


@define
class Tree:
    """The processes that `process_tree_program.py` made, and those the storms made."""

    state_dir: str
    popen: subprocess.Popen[bytes]
    pids: dict[str, Any]
    handles: dict[str, int] = field(factory=dict)
    """Descriptors of the five: the storms use up all numbers within seconds, so a number may belong to any process."""

    def __attrs_post_init__(self) -> None:
        self.handles = {name: os.pidfd_open(self.pid(name)) for name in ROLES}

    def pid(self, who: str) -> int:
        return self.pids["shims"]["storm-a"] if who == "shim" else self.pids[who]

    def kill(self, *who: str) -> None:
        for name in who:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handles[name], signal.SIGKILL)

    def close(self) -> None:
        for descriptor in self.handles.values():
            os.close(descriptor)

    def marked(self) -> list[int]:
        """Everything below the node that a later node would recognize by the mark."""
        return [pid for pid in _pids() if has_mark(pid, STATE_MARK, self.state_dir)]

    def below(self) -> list[int]:
        """Everything below the node, programs with an empty environment included."""
        return self.marked() + [pid for pid in _pids() if _argv0(pid).startswith(self.state_dir)]

    def of_job(self, name: str) -> list[int]:
        """Processes of one storm, executed programs included."""
        argv0 = f"{self.state_dir}/{name}"
        return [pid for pid in self.below() if comm(pid) == f"fray:{name}" or _argv0(pid) == argv0]

    def shims(self) -> dict[int, str]:
        """Living shims and their jobs' names as they are now; those that have forked their job."""
        found = {}
        for pid in self.marked():
            if comm(pid).startswith("fray:storm") and comm(parent := parent_of(pid)) == "fray-shim":
                found[parent] = comm(pid).removeprefix("fray:")
        return found


def kill_if(pid: int, is_it: Callable[[int], bool]) -> None:
    """See `Tree.handles`."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if is_it(pid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode()
    except OSError:
        return ""


def comm(pid: int) -> str:
    return _read(pid, "comm").strip()


def _argv0(pid: int) -> str:
    return _read(pid, "cmdline").partition("\0")[0]


def seconds_until_gone(look: Callable[[], list[int]], limit_s: float) -> float:
    """Wait for the end of all that ``look`` finds, until it finds nothing; fails after ``limit_s``."""
    begun = time.monotonic()
    while pids := look():
        for pid in pids:
            left_s = limit_s - (time.monotonic() - begun)
            assert left_s > 0, f"{len(pids)} are left after {limit_s} s: {[(pid, comm(pid)) for pid in pids]}"
            wait_end(pid, left_s)
    return time.monotonic() - begun


def wait_end(pid: int, limit_s: float) -> bool:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            return bool(select.select([descriptor], [], [], limit_s)[0])
        finally:
            os.close(descriptor)
    return True


def parent_of(pid: int) -> int:
    words = _read(pid, "stat").rpartition(")")[2].split()
    return int(words[1]) if words else 0


def lives(pid: int) -> bool:
    return bool(_read(pid, "stat")) and ") Z " not in _read(pid, "stat")


@contextlib.contextmanager
def open_tree(state_dir: str, pid_namespace: str = "off") -> Iterator[Tree]:
    read, write = os.pipe()
    command = [sys.executable, str(TREE), "driver", state_dir, str(write), pid_namespace]
    popen = subprocess.Popen(command, pass_fds=[write], start_new_session=True)
    os.close(write)
    with open(read) as ready:
        assert select.select([read], [], [], READY_S)[0], "the tree was not ready in time"
        line = ready.readline()
    tree = Tree(state_dir, popen, json.loads(line))
    try:
        yield tree
    finally:
        tree.kill(*ROLES)
        popen.wait()
        end_all(lambda pid: has_mark(pid, STATE_MARK, state_dir))
        for pid in tree.below():
            kill_if(pid, lambda pid: _argv0(pid).startswith(state_dir))
        tree.close()


def sleeping(seconds: str) -> list[int]:
    """Pids, as this machine has them, of the processes that sleep for so long."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_text().split("\0")[:2] == ["sleep", seconds]:
                found.append(int(process.name))
        except OSError:
            continue
    return found
