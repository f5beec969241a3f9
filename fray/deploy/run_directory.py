"""Directory of an embedded cluster: sockets, logs and spools, removed with its driver.

Invariant: the driver and each of its nodes hold the lock of their directory; the kernel releases it when the last of
them has ended, however it ended. So a directory whose lock is free has been abandoned, and the next start removes it.
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
LOCK = "run-directory.lock"
"""Also what tells these directories from all others below the temporary one: stores of controllers and of training
services, and state directories of nodes, have a file ``lock``, which is free while their daemon is down."""


@frozen
class RunDirectory:
    """Directory of this process's cluster, with its lock."""

    path: str
    lock_fd: int
    """File descriptor of the lock; the nodes inherit it."""


@contextmanager
def open_run_directory() -> Iterator[RunDirectory]:
    """Make a new directory (mode 0700) below the temporary one; removed on exit.

    Raises:
        OSError: it cannot be made.
    """
    path = tempfile.mkdtemp(prefix=PREFIX)
    lock_fd = -1
    try:
        lock_fd = _lock(f"{path}/{LOCK}")
        yield RunDirectory(path, lock_fd)
    finally:
        # Before the lock is released: a free lock invites the next driver to remove the directory, too.
        shutil.rmtree(path, ignore_errors=True)
        if lock_fd >= 0:
            os.close(lock_fd)


def _lock(path: str) -> int:
    """Make and hold the lock; it gets its name only then, so that no other process ever finds it free."""
    descriptor = os.open(f"{path}.new", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # `flock` belongs to the open file, which nodes inherit; POSIX locks would be lost with the driver's process.
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(f"{path}.new", path)
    return descriptor


def remove_abandoned() -> int:
    """Remove the directories of this user's killed drivers; return their number."""
    return sum(map(_remove_if_abandoned, Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}")))


def _remove_if_abandoned(lock: Path) -> bool:
    with suppress(OSError):  # locked, another user's, or removed meanwhile
        # /tmp is writable by all users: a link could make this process remove another directory.
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
