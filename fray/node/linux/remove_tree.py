"""Removal of directories that a job has written to: anything may be in them. Everything here blocks.

Invariants: nothing outside is removed. Links are not followed; what the job has mounted there (a bucket, a share) is
unmounted first, and if that fails nothing is removed: a share must not lose its files with the attempt that used it.
Any depth and any modes are handled.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

DEEP = 40
"""Number of directories open at a time; what is deeper is moved to the top first."""
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_ESCAPED = re.compile(rb"\\([0-7]{3})")

log = logging.getLogger("fray.node")


def remove(directory: Path) -> bool:
    """Remove a directory and everything below it; return False, after logging why, if something is left. It need not
    exist."""
    try:
        # lstat: a job may have replaced its directory by a link to its data, of which only the link is removed.
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            os.unlink(directory)
        elif unmount(directory):
            _remove(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        log.warning("cannot remove %s: %s", directory, error)
    return not os.path.lexists(directory)


def unmount(directory: Path) -> bool:
    """Unmount everything mounted there or below; return False if that fails."""
    place = os.fsencode(os.path.realpath(directory))
    # The longest first: a mount within another one must go before it.
    for point in sorted(_mounts(place), key=len, reverse=True):
        # Detached lazily: an ordinary unmount blocks on a file server that does not answer, and fails while a file is
        # open.
        if ctypes.CDLL(None, use_errno=True).umount2(point, _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
            why = os.strerror(ctypes.get_errno())
            log.error("cannot unmount %s, which a job has left mounted: %s", os.fsdecode(point), why)
            return False
        log.warning("unmounted %s, which a job had left mounted", os.fsdecode(point))
    return True


def _mounts(place: bytes) -> Iterator[bytes]:
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            # The kernel writes blanks, tabs, newlines and backslashes as octal escapes.
            point = _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split()[4])
            if point == place or point.startswith(place + b"/"):
                yield point


def _remove(directory: Path) -> None:
    # All further steps are relative to open directories: a path through a name that the job has swapped for a link
    # would lead outside.
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = (f"deep.{os.urandom(4).hex()}.{number}" for number in itertools.count())
        # `shutil.rmtree` recurses and fails with RecursionError below a thousand levels, which any job can create.
        while _remove_contents(top, top, names, DEEP):
            pass
    finally:
        os.close(top)
    os.rmdir(directory)


def _remove_contents(place: int, top: int, names: Iterator[str], levels: int) -> bool:
    """Remove what is in the directory; return True if some of it was moved to the top."""
    raised = False
    for name, is_directory in _entries(place):
        if not is_directory:
            os.unlink(name, dir_fd=place)
        elif levels:
            with _open_directory(name, place) as below:
                raised = _remove_contents(below, top, names, levels - 1) or raised
            os.rmdir(name, dir_fd=place)
        else:
            # Too deep: moved to the top and removed in the next pass, so recursion and open descriptors stay bounded.
            os.rename(name, next(names), src_dir_fd=place, dst_dir_fd=top)
            raised = True
    return raised


def _entries(place: int) -> list[tuple[str, bool]]:
    with os.scandir(place) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _allow(name: str, place: int) -> None:
    """Give a directory the mode 0700."""
    # By a descriptor: a process of another account could replace the name by a link, which `chmod` would follow.
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
    finally:
        os.close(found)


@contextlib.contextmanager
def _open_directory(name: str, place: int) -> Iterator[int]:
    """Open a directory, whatever its mode is."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # Jobs leave directories without write permission (Go's module cache), whose contents cannot be removed.
    if os.stat(name, dir_fd=place, follow_symlinks=False).st_mode & 0o700 != 0o700:
        _allow(name, place)
    below = os.open(name, flags, dir_fd=place)
    try:
        yield below
    finally:
        os.close(below)
