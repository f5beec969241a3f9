"""Control groups for attempts: one each, below the node's own, where the node may make them.

Version 2 where the memory controller is handed down to the node, else version 1, else none. A group holds all of an
attempt whatever its processes do (they cannot leave it without root's rights), so it is also where a later life of the
node finds those that cleared their environment. Everything is read and written below ``root``, so that tests can
describe a machine as a tree of files.
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
    """One attempt's."""

    path: str
    version: int

    def pids(self) -> list[int]:
        """Who is in it, by the numbers of the caller's PID namespace; empty if it is gone."""
        return [pid for word in _read(Path(self.path) / "cgroup.procs").split() if (pid := int(word))]

    def add_process(self, pid: int) -> None:
        """Put a process into it, with all its threads; those it forks later are in it from the start.

        The kernel may take 20 ms for it.
        """
        with contextlib.suppress(ProcessLookupError):
            _write(Path(self.path) / "cgroup.procs", str(pid))

    def oom_kills(self) -> int:
        """How many of it the kernel has killed for lack of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        words = dict(line.split()[:2] for line in _read(Path(self.path) / name).splitlines() if " " in line)
        return int(words.get("oom_kill", 0))

    def peak_bytes(self) -> int:
        """The most it has ever held, files in memory included; 0 if the kernel does not say."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        text = _read(Path(self.path) / name).strip()
        return int(text) if text.isdigit() else 0

    def kill_and_remove(self, *, limit_s: float = END_S) -> int:
        """Kill all that is in it until nothing is, and remove it.

        Returns how many are left after ``limit_s``; 1 also for a group that has nobody in it and cannot be removed yet.
        """
        deadline = time.monotonic() + limit_s
        while not self.remove():
            pids = self.pids()
            if time.monotonic() > deadline:
                return len(pids) or 1
            self._kill(pids)
            time.sleep(0.002)
        return 0

    def _kill(self, pids: Iterable[int]) -> None:
        killer = Path(self.path) / "cgroup.kill"
        if killer.exists():  # all at once, those that are being forked included
            _write(killer, "1")
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # of a group nobody else has: the number is one of its own, or gone

    def remove(self) -> bool:
        """False: there is still something in it."""
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        return True


class CgroupManager:
    """Where a node makes the groups of its attempts.

    Args:
        base: the group they are made in.
        owner: what tells this node's groups from another's there: its state directory.
    """

    def __init__(self, base: Path, version: int, owner: str) -> None:
        self.base, self.version = base, version
        self._prefix = f"{PREFIX}{hashlib.sha256(owner.encode()).hexdigest()[:10]}-"

    @property
    def kind(self) -> str:
        return f"cgroup{self.version}"

    def make(self, name: str, limit_bytes: int = 0) -> Cgroup:
        """A new group; ``limit_bytes`` 0: one that limits nothing.

        Raises:
            OSError: it cannot be made.
        """
        path = self.base / f"{self._prefix}{name}"
        path.mkdir(exist_ok=True)
        group = Cgroup(str(path), self.version)
        if limit_bytes:
            for file, text, needed in _LIMITS[self.version]:
                with contextlib.nullcontext() if needed else contextlib.suppress(OSError):
                    _write(path / file, text.format(limit_bytes))
        return group

    def leftover(self) -> Iterator[Cgroup]:
        """Groups that an earlier life of this node left behind."""
        for path in sorted(self.base.glob(f"{self._prefix}*")):
            yield Cgroup(str(path), self.version)


_LIMITS = {
    2: (("memory.max", "{}", True), ("memory.swap.max", "0", False), ("memory.oom.group", "1", False)),
    1: (("memory.limit_in_bytes", "{}", True), ("memory.memsw.limit_in_bytes", "{}", False)),
}
"""File, text, and whether it must be there. What is limited is memory: swap would only make the end come slower."""


def find_cgroup_manager(owner: str, root: Path = ROOT) -> CgroupManager | None:
    """Where this process may make groups with a limit on memory; None: nowhere."""
    for version, base in ((2, _base_v2(root)), (1, _base_v1(root))):
        if base is not None and _may_make(base):
            return CgroupManager(base, version, owner)
    return None


def _base_v2(root: Path) -> Path | None:
    """This process's group, if the memory controller comes down to it and can be handed on."""
    path = _own_path(root, "")
    mount = root / "sys/fs/cgroup"
    if path is None or not (mount / "cgroup.controllers").exists():
        return None
    base = mount / path.lstrip("/")
    if "memory" not in _read(base / "cgroup.controllers").split():
        return None
    return base if _hand_down(base) else None


def _hand_down(base: Path) -> bool:
    """Give children of the group the memory controller. A group that has children with controllers may hold no
    processes itself, so this one moves into a child, unless it is not alone."""
    control = base / "cgroup.subtree_control"
    if "memory" in _read(control).split():
        return True
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
    """In one write, as the kernel wants it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
