"""Directories of shared segments: one per lender, private, locked while it lives, swept afterwards.

A dead process is recognised by its lock, which can be acquired then: names and times prove nothing. POSIX locks are
used, since those of `flock` survive in forked children.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator

from fray.net.process_identity import boot_id

BASES = ("/dev/shm", "/tmp")
"""File systems of segments, without FRAY_SEGMENT_DIRECTORY."""
WORTH_BYTES = 256 * 1024 * 1024
"""Minimum free space of a file system for use (containers often give /dev/shm 64 MiB)."""
NAME_BYTES = 16
NONCE = "nonce"
"""Name of the file in each directory that proves access to it."""
STALE_S = 60.0
_LOCK, _NEW = "lock", ".new"


own_directories: set[str] = set()
"""Directories of this process: it could acquire their locks again, and trying would lose them."""


def bases() -> tuple[str, ...]:
    """Return the directories in which this process lends and borrows segments, the first one that does preferred."""
    chosen = os.environ.get("FRAY_SEGMENT_DIRECTORY")
    return (chosen,) if chosen else BASES


def host_key() -> str:
    """Return a name that is equal in the processes that can map each other's segments; "" if this one has none."""
    for base in bases():
        try:
            # The device differs where a container has a file system of its own for them.
            return f"{boot_id()} {os.stat(base).st_dev} {base} {os.geteuid()}"
        except OSError:
            continue
    return ""


def private(path: str, flags: int) -> int:
    """Open a file that only this user can access (an opener for `open`)."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def prefix(uid: int | None = None) -> str:
    """Return the prefix of the names of a user's directories; None: this process's user."""
    return f"fray-{os.geteuid() if uid is None else uid}-"


def make(bases: tuple[str, ...]) -> tuple[str, int]:
    """Create a locked directory; return its path and the descriptor that holds the lock."""
    error: OSError = FileNotFoundError("no directory for segments")
    for base in bases:
        try:
            room = os.statvfs(base)
            if room.f_bavail * room.f_frsize < WORTH_BYTES:
                continue
            path = os.path.join(base, prefix() + secrets.token_hex(NAME_BYTES))
            return path, _make_locked(path)
        except OSError as failed:
            error = failed
    raise error


def _make_locked(path: str) -> int:
    lock = -1
    os.mkdir(path + _NEW, 0o700)
    try:
        lock = os.open(os.path.join(path + _NEW, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the clean-up of run directories tries this lock
        # Before the final name exists, so that a sweep in another thread never tries the lock.
        own_directories.add(path)
        # Last: a directory of its final name without a lock belongs to a dead process.
        os.rename(path + _NEW, path)
    except OSError:
        shutil.rmtree(path + _NEW, ignore_errors=True)
        own_directories.discard(path)
        if lock >= 0:
            os.close(lock)
        raise
    return lock


def _directories_in(base: str, uid: int | None) -> Iterator[str]:
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in names:
        path = os.path.join(base, name)
        if name.startswith(prefix(uid)):
            yield path


def _is_left_over(path: str) -> bool:
    """Return whether its owner is dead: only then can its lock be acquired."""
    try:
        # One that is being made has no lock yet, so only its age can tell.
        if path.endswith(_NEW):
            return time.time() - os.stat(path).st_mtime > STALE_S
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # The directory without a lock file is an interrupted removal; no directory at all, a completed one.
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


def sweep(bases: tuple[str, ...], uid: int | None = None) -> int:
    """Remove directories of dead processes of a user; return how many. None: of this process's user."""
    # Without our own: closing any descriptor of a file gives up all POSIX locks of this process on it (fcntl(2)).
    others = [path for base in bases for path in _directories_in(base, uid) if path not in own_directories]
    left_over = list(filter(_is_left_over, others))
    for path in left_over:
        shutil.rmtree(path, ignore_errors=True)
    return len(left_over)
