"""PID namespace of one attempt: when its init ends, the kernel ends every process in it.

The init is the shim itself, forked by the zygote into a new namespace (`fork_init`). It also has a mount namespace with
a ``/proc`` of the same numbers, so that whatever reads ``/proc`` in there (`fray.node.linux.process_tree`, ``ps``,
py-spy) is consistent. Everything outside sees the machine's numbers, which the shim reads through its old ``/proc``
(`HostPidView`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re

from attrs import frozen

from fray.model.specs import EntryKind
from fray.node.config import PidNamespaceMode

# Programs have a namespace of their own by default, Python jobs do not: people read os.getpid() in a log and use it on
# the machine, files are named by it, and CUDA IPC and process_vm_readv between members of a gang need common numbers.
# It takes CAP_SYS_ADMIN and costs 0.4 ms on a quiet machine. User namespaces would give that capability to everyone,
# but files, groups and setuid programs mean something else in them, and the zygote would have no way back: not used.
_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_CAP_SYS_ADMIN = 21

_libc = ctypes.CDLL(None, use_errno=True)


def uses_pid_namespace(mode: PidNamespaceMode, entry: EntryKind, error: str) -> bool:
    """Return whether an attempt gets a namespace; ``error`` is why this machine has none, or empty."""
    return not error and (mode is PidNamespaceMode.ON or (mode is PidNamespaceMode.AUTO and entry is EntryKind.BINARY))


def isolation_mode(mode: PidNamespaceMode, error: str) -> str:
    """Return the node attribute ``isolation``: the mode in force on a node."""
    if error or mode is PidNamespaceMode.OFF:
        return "subreaper"
    return "pid_namespace" if mode is PidNamespaceMode.ON else "pid_namespace:programs"


# Making one ----------------------------------------------------------------------------------------------------------


def fork_init() -> int:
    """Fork, with the child as init of a new namespace. Only without threads.

    Raises:
        OSError: not permitted, or no process left; no child was forked.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # This moves the children of the caller, not the caller itself: the next fork is the init of the namespace.
        _check(_libc.unshare(_CLONE_NEWPID), "unshare")
        pid = 1
        try:
            pid = os.fork()
        finally:
            if pid:  # the parent, even if the fork failed: its next children belong to its own namespace
                _check(_libc.setns(own, _CLONE_NEWPID), "setns")
    finally:
        os.close(own)
    return pid


@frozen
class HostPidView:
    """The machine's view of pids, for a process in a namespace or in none."""

    pid: int
    """Pid of this process."""
    proc_fd: int = -1
    """The machine's ``/proc``; -1: this process's own."""

    def pid_of(self, pidfd: int, pid: int) -> int:
        """Return the machine's number for the process that the descriptor refers to and that is ``pid`` here."""
        if self.proc_fd < 0:
            return pid
        descriptor = os.open(f"self/fdinfo/{pidfd}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
        with open(descriptor) as file:
            found = re.search(r"^Pid:\s*(\d+)", file.read(), re.MULTILINE)
        return int(found[1]) if found else pid


def mount_proc() -> HostPidView:
    """Set up the namespace whose init this process is; do nothing in any other process.

    Raises:
        OSError: the system refuses; the process cannot be an init then.
    """
    # The inherited /proc still shows the machine's number. Where this process is pid 1 of a container, both are 1.
    inside = os.getpid() == 1 and (seen := os.readlink("/proc/self")) != "1"
    if not inside:
        return HostPidView(os.getpid())
    outside = HostPidView(int(seen), os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    _mount_proc()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(outside.pid - 1))  # programs name files by their pid: it must not be 2 in every attempt
    return outside


def _mount_proc() -> None:
    """Mount ``/proc`` in a new mount namespace, which still receives mounts made outside."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    # As a slave: with shared propagation the new /proc would cover the machine's own; private mounts would hide shares
    # that are mounted outside later.
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "mount")
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _check(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount")


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


# Availability ------------------------------------------------------------------------------------------------------


def namespace_error() -> str:
    """Return why this process cannot create namespaces; empty if a trial succeeded (1 ms). Only without threads."""
    if not _has_capability(_CAP_SYS_ADMIN):
        return "CAP_SYS_ADMIN (root) is required"
    # A trial, since the capability alone proves nothing: seccomp filters and container runtimes refuse unshare or
    # mount.
    read, write = os.pipe()
    try:
        pid = fork_init()
    except OSError as error:
        os.close(read)
        os.close(write)
        return str(error)
    if pid == 0:
        _try(write)
    os.close(write)
    with open(read, "rb") as answer:
        answer_text = answer.read()
    os.waitpid(pid, 0)
    return "" if answer_text == b"ok" else answer_text.decode(errors="replace") or "its init died"


def _try(write: int) -> None:
    answer_text = b"ok"
    try:
        mount_proc()
    except OSError as error:
        answer_text = str(error).encode()
    finally:
        os.write(write, answer_text)
        os._exit(0)


def _has_capability(number: int) -> bool:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
        return bool(found) and bool(int(found[1], 16) >> number & 1)  # type: ignore[index]
    return False
