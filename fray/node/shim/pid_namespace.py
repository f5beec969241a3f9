"""A PID namespace for one attempt: when its init ends, the kernel ends all that is in it, without exception.

The init is the shim itself, forked by the zygote into a namespace that is new (`fork_init`). It has a mount namespace
besides, with a ``/proc`` of the same numbers, so that whatever looks at ``/proc`` in there
(`fray.node.linux.process_tree`,
``ps``, py-spy) sees one world. Everybody else sees the machine's numbers, which the shim reads by its old ``/proc``
(`Outside`).

It takes ``CAP_SYS_ADMIN``. User namespaces would give that to anybody, but what is in one has other rights to files,
and the zygote would have no way back: not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re

from attrs import frozen

from fray.model.specs import EntryKind
from fray.node.config import PidNamespaceMode

_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_CAP_SYS_ADMIN = 21

_libc = ctypes.CDLL(None, use_errno=True)


def uses_pid_namespace(mode: PidNamespaceMode, entry: EntryKind, error: str) -> bool:
    """Whether an attempt gets a namespace; ``error`` is why this machine gives none, or empty."""
    return not error and (mode is PidNamespaceMode.ON or (mode is PidNamespaceMode.AUTO and entry is EntryKind.BINARY))


def isolation_mode(mode: PidNamespaceMode, error: str) -> str:
    """What is in force on a node, in a word: its attribute ``isolation_mode``."""
    if error or mode is PidNamespaceMode.OFF:
        return "subreaper"
    return "pid_namespace" if mode is PidNamespaceMode.ON else "pid_namespace:programs"


# Making one ----------------------------------------------------------------------------------------------------------


def fork_init() -> int:
    """`os.fork`, with the child as init of a new namespace. Only without threads.

    Raises:
        OSError: it is not allowed, or there is no process left. Nothing has happened then.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.unshare(_CLONE_NEWPID), "unshare")
        pid = 1
        try:
            pid = os.fork()
        finally:
            if pid:  # the parent, whether it has a child or not: those to come belong where it is
                _check(_libc.setns(own, _CLONE_NEWPID), "setns")
    finally:
        os.close(own)
    return pid


@frozen
class HostPidView:
    """The machine's view, for a process that is in a namespace or in none."""

    pid: int
    """Of this process."""
    proc_fd: int = -1
    """The machine's ``/proc``; -1: this process's own is it."""

    def pid_of(self, pidfd: int, pid: int) -> int:
        """The machine's number for the process that the descriptor holds and that is ``pid`` here."""
        if self.proc_fd < 0:
            return pid
        descriptor = os.open(f"self/fdinfo/{pidfd}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
        with open(descriptor) as file:
            found = re.search(r"^Pid:\s*(\d+)", file.read(), re.MULTILINE)
        return int(found[1]) if found else pid


def mount_proc() -> HostPidView:
    """Furnish the namespace whose init this process is; does nothing in a process that is none.

    Raises:
        OSError: the system refuses; the process cannot be an init of ours then.
    """
    inside = os.getpid() == 1 and (seen := os.readlink("/proc/self")) != "1"
    if not inside:
        return HostPidView(os.getpid())
    outside = HostPidView(int(seen), os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    _mount_proc()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(outside.pid - 1))  # programs name files by their pid: it shall not be 2 in every attempt
    return outside


def _mount_proc() -> None:
    """In a mount namespace of our own, which still hears of what is mounted outside."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "mount")
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _check(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount")


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


# Whether it can be ---------------------------------------------------------------------------------------------------


def namespace_error() -> str:
    """Why this process cannot make namespaces; empty: it can, as a trial has shown (1 ms). Only without threads."""
    if not _has_capability(_CAP_SYS_ADMIN):
        return "it takes CAP_SYS_ADMIN (root)"
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
        said = answer.read()
    os.waitpid(pid, 0)
    return "" if said == b"ok" else said.decode(errors="replace") or "its init died"


def _try(write: int) -> None:
    said = b"ok"
    try:
        mount_proc()
    except OSError as error:
        said = str(error).encode()
    finally:
        os.write(write, said)
        os._exit(0)


def _has_capability(number: int) -> bool:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
        return bool(found) and bool(int(found[1], 16) >> number & 1)  # type: ignore[index]
    return False
