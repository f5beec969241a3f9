"""The directory of an embedded cluster: sockets, logs and spools, gone when its driver is.

Law: whoever lives in one holds its lock, the driver and each of its nodes; the kernel lets go of it when the last has
ended, however it ended. So a directory whose lock can be taken belongs to the dead, and the next start removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

PREFIX = "fray-"
_LOCK = "lock"


@frozen
class RunDirectory:
    """A directory of ours."""

    path: str
    lock_fd: int
    """Child processes that live here inherit it."""


@contextmanager
def open_run_directory() -> Iterator[RunDirectory]:
    """A new directory (mode 0700) below the temporary one; removed on exit.

    Raises:
        OSError: it cannot be made.
    """
    path = tempfile.mkdtemp(prefix=PREFIX)
    lock_fd = -1
    try:
        lock_fd = _lock(f"{path}/{_LOCK}")
        yield RunDirectory(path, lock_fd)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock_fd >= 0:
            os.close(lock_fd)


def _lock(path: str) -> int:
    """Made under another name, so that nobody ever finds a lock that is not held yet."""
    descriptor = os.open(f"{path}.new", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(f"{path}.new", path)
    return descriptor


def remove_abandoned() -> int:
    """Remove the directories of this user's drivers that were killed; returns how many."""
    return sum(map(_remove_if_abandoned, Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}")))


def _remove_if_abandoned(lock: Path) -> bool:
    with suppress(OSError):  # held, another user's, or gone meanwhile
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
            return True
        finally:
            os.close(descriptor)
    return False
