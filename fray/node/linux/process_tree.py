"""Process tree below this process: inspection, and killing all of it.

Invariants: after `end_descendants` returned 0 nothing below this process is alive, however it forked, called ``setsid``
or daemonized. That holds because this process is a *subreaper* (orphans below it become its own children), because a
process that has been sent SIGKILL cannot create children (the kernel checks for it inside fork), and because only this
process reaps its children (so their pids cannot be reused between looking and killing).

Everything here is for single-threaded callers, or for callers that are the only ones to spawn in their process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Container

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FIRST_NAP_S = 0.0002
_LONGEST_NAP_S = 0.005

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper(on: bool = True) -> None:
    """Make orphans below this process its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def die_with(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Request a signal from the kernel when the parent *thread* ends; exit at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, number)
    # Checked after the request: if the parent ended before it, no signal will come.
    if os.getppid() != parent_pid:
        os._exit(1)


def set_title(title: str) -> None:
    """Set the name that ``ps`` and ``top`` show; the kernel keeps 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


# Inspection----------------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Return the direct children, zombies included. May miss one that is being reparented just now: call again."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    # The kernel lists children by the thread that forked them.
    for task in tasks:
        found.extend(_children_of_task(pid, task))
    return found


def _children_of_task(pid: int, task: str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def parents() -> dict[int, int]:
    """Return the parent of every process of the machine, by pid: slower than `children` and complete."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[pid] = int(_stat(pid)[1])
    return found


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process and of the children it has waited for, in clock ticks. Raises OSError."""
    return sum(map(int, _stat(pid)[11:15]))


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on (the command before it may contain blanks and
    brackets)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(pid: int) -> list[int]:
    """Return everything below ``pid`` that one look finds, parents before children."""
    found, at = [pid], 0
    while at < len(found):
        # A process that is reparented during the look may show up twice.
        found.extend(child for child in children(found[at]) if child not in found)
        at += 1
    return found[1:]


# Killing -------------------------------------------------------------------------------------------------------------


def end_descendants(
    spare: Container[int] = (), *, limit_s: float = 5.0, longest_nap_s: float = _LONGEST_NAP_S
) -> tuple[int, int]:
    """Kill and reap everything below this process, except the direct children in ``spare`` and what is below those.

    Returns how many were killed, and how many are still alive after ``limit_s``: 0 unless the kernel blocks them.
    """
    deadline, nap_s, struck = time.monotonic() + limit_s, _FIRST_NAP_S, set[int]()
    while True:
        doomed = _orphans(spare)
        if not doomed or time.monotonic() > deadline:
            return len(struck), len(doomed)
        # One by one and never waitpid(-1), which would also reap the spared children and take their end from their
        # owners.
        living = [pid for pid in doomed if not _reap(pid)]
        for pid in living:
            struck.update(kill_tree(pid))
        reaped = len(living) < len(doomed) or sum(map(_reap, living)) > 0
        if reaped:  # a fork bomb is outrun only by not sleeping while there is progress
            nap_s = _FIRST_NAP_S
            continue
        time.sleep(nap_s)
        nap_s = min(nap_s * 2, longest_nap_s)


def _orphans(spare: Container[int]) -> list[int]:
    me = os.getpid()
    found = [pid for pid in children(me) if pid not in spare]
    if found or _has_no_children():
        return found
    # There are children that the cheap listing has missed (it does while one is reparented), or only spared ones.
    return [pid for pid, parent in parents().items() if parent == me and pid not in spare]


def _has_no_children() -> bool:
    try:
        # WNOWAIT: looks without reaping. Only the error counts, which means that there are no children at all.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def kill_tree(root: int) -> list[int]:
    """Send SIGKILL to an unreaped child of this process and to all below it, from the top down.

    In this order no parent makes a replacement. What is missed is, or becomes, a child of this process. Returns the
    pids that were signalled.
    """
    me, struck = os.getpid(), [root]
    # The root has not been reaped, so its number is certainly its own.
    todo = [(child, root) for child in _kill_if(root, lambda: True)]
    while todo:
        pid, parent = todo.pop()
        struck.append(pid)
        # A child of the listed parent or, since that was killed, an orphan of this process: otherwise the number was
        # reused.
        todo += [(child, pid) for child in _kill_if(pid, lambda: _parent(pid) in (parent, me))]  # noqa: B023
    return struck


def _kill_if(pid: int, is_it: Callable[[], bool]) -> list[int]:
    """Kill ``pid`` if ``is_it`` holds, and return its children; none if it has ended meanwhile."""
    try:
        # A pid may be reused at any moment. So the descriptor comes first, the check second, and the signal goes to the
        # descriptor.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return []
    try:
        if not is_it():
            return []
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        # After the signal: a process with a pending SIGKILL cannot fork, so the list does not grow any more.
        below = children(pid)
        # If it has ended, the list may be of another process with its number; its real children are orphans and found
        # later.
        return [] if _has_ended(descriptor) else below
    except (ProcessLookupError, PermissionError, FileNotFoundError):
        return []
    finally:
        os.close(descriptor)


def _has_ended(pidfd: int) -> bool:
    # poll and not select, which fails for descriptors from 1,024 on.
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(0))


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


# Survivors of an earlier run -----------------------------------------------------------------------------------------


def has_mark(pid: int, variable: str, mark: str) -> bool:
    """Return whether a process was executed with this mark in ``variable``, where marks are joined by ``:``.

    The variable counts in the environment and, as ``VARIABLE=marks``, in the command line, which can also be read of
    processes that forbid inspection. A fork has both of its parent; a zombie has none.
    """
    start = f"{variable}="
    words = [*_words(pid, "environ"), *_words(pid, "cmdline")]
    return any(mark in word.removeprefix(start).split(":") for word in words if word.startswith(start))


def _words(pid: int, file_name: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/{file_name}", "rb") as file:
            return os.fsdecode(file.read()).split("\0")
    except OSError:
        return []


def works_in(pid: int, directory: str) -> bool:
    """Return whether its working directory is below ``directory`` (ending with a slash), even if that was removed."""
    try:
        # The kernel adds " (deleted)" at the end of a removed directory's path.
        return os.readlink(f"/proc/{pid}/cwd").startswith(directory)
    except OSError:
        return False


def has_terminal(pid: int) -> bool:
    """Return whether the process has a terminal, as what a person starts has."""
    try:
        return _stat(pid)[4] != b"0"
    except (OSError, IndexError):
        return False


def end_all(is_meant: Callable[[int], bool], *, limit_s: float = 10.0) -> tuple[int, int]:
    """Kill every process but this one that is meant.

    Returns how many were killed, and how many were still found when ``limit_s`` had passed.
    """
    deadline, ended = time.monotonic() + limit_s, set[int]()
    while True:
        struck = _strike_meant(is_meant, deadline)
        if not struck or time.monotonic() > deadline:
            return len(ended), len(struck)
        ended |= struck
        # Another look even if all were killed: one of them may have forked before.
        time.sleep(_FIRST_NAP_S)


def _strike_meant(is_meant: Callable[[int], bool], deadline: float) -> set[int]:
    """Check all processes until a listing contains none that was not checked, and kill those that are meant."""
    seen, struck = {os.getpid()}, set[int]()
    # Repeated, so that a process that lives for a millisecond and leaves another one behind is not overlooked.
    while fresh := [pid for pid in _pids() if pid not in seen]:
        for pid in fresh:
            if is_meant(pid):
                struck.add(pid)
                # Checked once more for the descriptor: between the listing and now the number may have been reused.
                _kill_if(pid, lambda: is_meant(pid))  # noqa: B023
        seen.update(fresh)
        if time.monotonic() > deadline:
            break
    return struck
