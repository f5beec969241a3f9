"""Leftovers of an account on this machine: processes, and what outlives them outside of its own directories.

What is elsewhere (a file server) stays, and belongs to the next user of the uid.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fray.node.linux.remove_tree import remove

SHARED_DIRECTORIES = (Path("/dev/shm"), Path("/dev/mqueue"), Path("/tmp"), Path("/var/tmp"))
_IPC_RMID = 0
_SYSV = {"shm": ("shmid", "shmctl"), "msg": ("msqid", "msgctl"), "sem": ("semid", "semctl")}
"""Kind: column of its ids in /proc/sysvipc, and the function that removes one."""

_libc = ctypes.CDLL(None, use_errno=True)


def uid_of(pid: int | str) -> int:
    """Return the real uid of a process; -1 if it has ended."""
    # Not the owner of the directory, which is root for a process that is not dumpable.
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    return -1


def processes_of(uid: int) -> list[int]:
    """Return the processes of an account."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and uid_of(name) == uid]


def remove_leftovers(uid: int, directories: tuple[Path, ...] = SHARED_DIRECTORIES) -> str:
    """Remove what an account without jobs has left; return what is still there, empty: nothing. Blocks."""
    # First: a process could make more while the rest is removed.
    if pids := processes_of(uid):
        return f"process {pids[0]} runs under uid {uid}"
    for path in _files_of(uid, directories):
        if not remove(path):
            return f"{path} of uid {uid} cannot be removed"
    for kind, (column, control) in _SYSV.items():
        for number in _sysv_objects(kind, column, uid):
            # Of semctl the command is the third argument, of the others the second. Both are zeros, and so is the rest.
            getattr(_libc, control)(number, _IPC_RMID, _IPC_RMID)
    return ""


def _files_of(uid: int, directories: tuple[Path, ...]) -> Iterator[Path]:
    for directory in directories:
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        yield Path(entry.path)


def _sysv_objects(kind: str, column: str, uid: int) -> Iterator[int]:
    with suppress(OSError, ValueError):
        head, *lines = Path("/proc/sysvipc", kind).read_text().splitlines()
        names = head.split()
        for line in lines:
            words = line.split()
            if int(words[names.index("uid")]) == uid:
                yield int(words[names.index(column)])
