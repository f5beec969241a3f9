"""The directories that segments lie in: one a lender, with a random name, locked as long as it lives, swept when not.

They are for their user alone. What a dead process leaves is seen by the lock, which can be had then.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator

BASES = ("/dev/shm", "/tmp")
WORTH_BYTES = 256 * 1024 * 1024
"""A file system with less room is not used (containers often give /dev/shm 64 MiB)."""
NAME_BYTES = 16
NONCE = "nonce"
"""The file in each that proves who can read it."""
STALE_S = 60.0
_LOCK, _NEW = "lock", ".new"


mine: set[str] = set()
"""Those of this process: it would not be refused their locks, and to try one would lose it."""


def private(path: str, flags: int) -> int:
    """An opener of files for this user alone."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def prefix() -> str:
    """With which the names of this user's directories begin."""
    return f"fray-{os.geteuid()}-"


def make(bases: tuple[str, ...]) -> tuple[str, int]:
    """A new directory, locked, and the descriptor that holds the lock.

    It gets its name last: a directory of that name without a lock on it belongs to the dead.
    """
    error: OSError = FileNotFoundError("no directory for segments")
    for base in bases:
        try:
            room = os.statvfs(base)
            if room.f_bavail * room.f_frsize < WORTH_BYTES:
                continue
            path = os.path.join(base, prefix() + secrets.token_hex(NAME_BYTES))
            os.mkdir(path + _NEW, 0o700)
            lock = os.open(os.path.join(path + _NEW, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who looks for left-over run directories tries this one
            mine.add(path)
            os.rename(path + _NEW, path)
            return path, lock
        except OSError as failed:
            error = failed
    raise error


def _in(base: str) -> Iterator[str]:
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in names:
        path = os.path.join(base, name)
        if name.startswith(prefix()):
            yield path


def _is_left_over(path: str) -> bool:
    """Whether its owner is dead: only then can its lock be had."""
    try:
        if path.endswith(_NEW):
            return time.time() - os.stat(path).st_mtime > STALE_S
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return os.path.isdir(path)
    except OSError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def sweep(bases: tuple[str, ...]) -> int:
    """Remove what dead processes of this user left; returns how many directories that were."""
    doomed = [path for base in bases for path in _in(base) if path not in mine and _is_left_over(path)]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return len(doomed)
