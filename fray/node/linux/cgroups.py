"""Control groups of attempts, below the node's own group, where the node may create them.

Version 2 where the memory controller is delegated to the node, else version 1, else none. A group holds all processes
of an attempt whatever they do (they cannot leave it without root's rights), so it is also where a later run of the node
finds those that cleared their environment. Everything is read and written below ``root``, so that tests can describe a
machine as a tree of files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path("/")
PREFIX = "fray-"
_NODE_GROUP = "fray-node"
END_S = 5.0


@frozen
class Cgroup:
    """Control group of one attempt."""

    path: str
    version: int

    def pids(self) -> list[int]:
        """Return its processes, by the numbers of the caller's PID namespace; empty if the group does not exist."""
        return [pid for word in _read(Path(self.path) / "cgroup.procs").split() if (pid := int(word))]

    def add_process(self, pid: int) -> None:
        """Move a process into the group, with all its threads; its later children are in it from the start.

        The kernel may take 20 ms for it.
        """
        with contextlib.suppress(ProcessLookupError):
            _write(Path(self.path) / "cgroup.procs", str(pid))

    def oom_kills(self) -> int:
        """Return how many of its processes the kernel has killed for lack of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        words = dict(line.split()[:2] for line in _read(Path(self.path) / name).splitlines() if " " in line)
        return int(words.get("oom_kill", 0))

    def peak_bytes(self) -> int:
        """Return its peak memory, page cache included; 0 if the kernel does not provide it."""
        # memory.peak exists since Linux 5.19.
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        text = _read(Path(self.path) / name).strip()
        return int(text) if text.isdigit() else 0

    def kill_and_remove(self, *, limit_s: float = END_S) -> int:
        """Kill everything in the group until it is empty, and remove it.

        Returns how many are left after ``limit_s``; 1 also for an empty group that cannot be removed yet.
        """
        deadline = time.monotonic() + limit_s
        # rmdir is the test: the kernel refuses it exactly as long as the group has processes.
        while not self.remove():
            pids = self.pids()
            if time.monotonic() > deadline:
                return len(pids) or 1
            self._kill(pids)
            # Killed processes leave the group when the kernel has freed their memory, which takes a moment.
            time.sleep(0.002)
        return 0

    def _kill(self, pids: Iterable[int]) -> None:
        killer = Path(self.path) / "cgroup.kill"
        if killer.exists():  # all at once, including those that are being forked
            _write(killer, "1")
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # The group belongs to this node alone: the pid is one of its processes, or unused.
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group; return False if there is still something in it."""
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        return True


class CgroupManager:
    """Creates and finds the groups of one node's attempts.

    Args:
        base: parent of the groups.
        owner: distinguishes this node's groups from other nodes' there: the id of its state directory.
    """

    def __init__(self, base: Path, version: int, owner: str) -> None:
        self.base, self.version = base, version
        self._prefix = f"{PREFIX}{hashlib.sha256(owner.encode()).hexdigest()[:10]}-"

    @property
    def kind(self) -> str:
        return f"cgroup{self.version}"

    def make(self, name: str, limit_bytes: int = 0) -> Cgroup:
        """Create a group; ``limit_bytes`` 0: without a limit.

        Raises:
            OSError: it cannot be created.
        """
        path = self.base / f"{self._prefix}{name}"
        path.mkdir(exist_ok=True)
        group = Cgroup(str(path), self.version)
        if limit_bytes:
            for file, text, needed in _LIMITS[self.version]:
                # Swap accounting may be off, and old kernels lack memory.oom.group.
                with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
                    _write(path / file, text.format(limit_bytes))
        return group

    def leftover(self) -> Iterator[Cgroup]:
        """Yield the groups that an earlier run of this node left behind."""
        for path in sorted(self.base.glob(f"{self._prefix}*")):
            yield Cgroup(str(path), self.version)


_LIMITS = {
    2: (("memory.max", "{}", True), ("memory.swap.max", "0", False), ("memory.oom.group", "1", False)),
    1: (("memory.limit_in_bytes", "{}", True), ("memory.memsw.limit_in_bytes", "{}", False)),
}
"""File, text, and whether it must exist. Memory is limited, not swap: swapping would only delay the end."""


def find_cgroup_manager(owner: str, root: Path = ROOT) -> CgroupManager | None:
    """Return a manager where this process may create groups with a memory limit; None: nowhere."""
    # Where both are mounted, one of them has the memory controller. Version 2 is preferred: it kills a group in one
    # step.
    for version, base in ((2, _base_v2(root)), (1, _base_v1(root))):
        if base is not None and _may_make(base):
            return CgroupManager(base, version, owner)
    return None


def _base_v2(root: Path) -> Path | None:
    """Return this process's group, if the memory controller is available in it and can be delegated."""
    path = _own_path(root, "")
    mount = root / "sys/fs/cgroup"
    if path is None or not (mount / "cgroup.controllers").exists():
        return None
    base = mount / path.lstrip("/")
    if "memory" not in _read(base / "cgroup.controllers").split():
        return None
    return base if _hand_down(base) else None


def _hand_down(base: Path) -> bool:
    """Delegate the memory controller to children of the group, if it has only this process; return whether that
    worked."""
    control = base / "cgroup.subtree_control"
    if "memory" in _read(control).split():
        return True
    # The "no internal processes" rule of version 2: a group cannot have processes and children with controllers. Moving
    # this process out of the way is harmless, moving others is not the node's right.
    if [pid for pid in _read(base / "cgroup.procs").split() if int(pid) != os.getpid()]:
        return False
    try:
        (base / _NODE_GROUP).mkdir(exist_ok=True)
        _write(base / _NODE_GROUP / "cgroup.procs", str(os.getpid()))
        _write(control, "+memory")
    except OSError:
        return False
    return True


def _base_v1(root: Path) -> Path | None:
    path = _own_path(root, "memory")
    mount = root / "sys/fs/cgroup/memory"
    if path is None:
        return None
    base = mount / path.lstrip("/")
    # Inside a container the path may be the host's and not exist here.
    return base if (base / "memory.limit_in_bytes").exists() else None


def _own_path(root: Path, controller: str) -> str | None:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return None


def _may_make(base: Path) -> bool:
    trial = base / f"{PREFIX}trial-{os.getpid()}"
    try:
        # A trial, since the mode bits do not show a read-only mount, as containers have.
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    """Write in one call, as the kernel requires."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
