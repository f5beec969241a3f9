"""Removing what a job had for its own: it may have left anything there.

Law: nothing outside goes. Links are not followed; what the job has mounted there (a bucket, a share) is unmounted
first, and where that cannot be done nothing is removed. Depth and modes are no obstacle. Everything here blocks.
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
"""So many directories are open at a time; what is deeper comes up first."""
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_ESCAPED = re.compile(rb"\\([0-7]{3})")

log = logging.getLogger("fray.node")


def remove(directory: Path) -> bool:
    """Remove it and all below; False if something of it is left, and that was logged. It need not be there."""
    try:
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            os.unlink(directory)
        elif unmount(directory):
            _remove(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        log.warning("%s cannot be removed: %s", directory, error)
    return not os.path.lexists(directory)


def unmount(directory: Path) -> bool:
    """Unmount all that is mounted there or below; False if that cannot be done."""
    place = os.fsencode(os.path.realpath(directory))
    for point in sorted(_mounts(place), key=len, reverse=True):
        if ctypes.CDLL(None, use_errno=True).umount2(point, _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
            why = os.strerror(ctypes.get_errno())
            log.error("a job has left a mount at %s, which cannot be unmounted: %s", os.fsdecode(point), why)
            return False
        log.warning("unmounted %s, which a job has left", os.fsdecode(point))
    return True


def _mounts(place: bytes) -> Iterator[bytes]:
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            point = _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split()[4])
            if point == place or point.startswith(place + b"/"):
                yield point


def _remove(directory: Path) -> None:
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = (f"deep.{os.urandom(4).hex()}.{number}" for number in itertools.count())
        while _empty(top, top, names, DEEP):
            pass
    finally:
        os.close(top)
    os.rmdir(directory)


def _empty(place: int, top: int, names: Iterator[str], levels: int) -> bool:
    """Remove what is in the directory; True if some of it is at the top now."""
    raised = False
    for name, is_directory in _entries(place):
        if not is_directory:
            os.unlink(name, dir_fd=place)
        elif levels:
            with _opened(name, place) as below:
                raised = _empty(below, top, names, levels - 1) or raised
            os.rmdir(name, dir_fd=place)
        else:
            os.rename(name, next(names), src_dir_fd=place, dst_dir_fd=top)
            raised = True
    return raised


def _entries(place: int) -> list[tuple[str, bool]]:
    with os.scandir(place) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


@contextlib.contextmanager
def _opened(name: str, place: int) -> Iterator[int]:
    """Whatever its mode is."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if os.stat(name, dir_fd=place, follow_symlinks=False).st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=place)
    below = os.open(name, flags, dir_fd=place)
    try:
        yield below
    finally:
        os.close(below)
