"""Reusable copies of workspaces: left by ended attempts, restored and given to the next attempts.

Invariants: a copy that an attempt of one user has left is given to attempts of that user alone. All that an attempt has
changed, added or removed is undone before another attempt gets the copy: a file is unchanged if it was changed last
(ctime, which no process can set) before the copy was handed out, and has its kind, mode, size and number of links. All
functions block.

Creating ten thousand files costs a file system 0.3 to 4 seconds (ext4 avoids inodes that were just freed), checking
them 0.1. Measured with 10,000 files of 4 KB: without this module, a second start on a machine takes 3 times as long,
and a start after the edit of one file 5 times.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from attrs import Factory, define

from fray.model.ids import BlobId
from fray.model.workspace import LINK, PROGRAM, FileEntry, Manifest
from fray.node.linux.remove_tree import remove, unmount

COPIES_LIMIT_BYTES = 2 * 1000**3
"""Limit for all copies that wait for an attempt."""
COPIES_LIMIT = 8
"""Most copies of one workspace."""
LOOK_AT = 3
"""Other workspaces, the most recent first, that are tried as an earlier version of this one."""

IsUntouched: TypeAlias = Callable[[os.stat_result, FileEntry], bool]


@define
class ReusableCopies:
    """The copies in one directory of the store, named ``{bundle}.{bytes}.{user}.{handed}.{token}``: ``user`` is a hash
    of the user, ``handed`` the time (ctime, ns) at which the copy was complete before its first attempt got it."""

    root: Path
    is_untouched: IsUntouched
    """Checks size and modification time of a file."""
    handed_ns: dict[Path, int] = Factory(dict)
    """Times of the copies that attempts have. In memory, since attempts can write to all that is near their copies; a
    copy that another process has handed out is not used again."""

    def hand_out(self, copy: Path) -> None:
        """Note that a copy is complete: what changes from now on is a change by its attempt."""
        # The clock of the file system, in steps of up to 10 ms: the mark must be later than the last file.
        os.utime(copy)
        newest = mark = os.stat(copy).st_ctime_ns
        while mark <= newest:
            time.sleep(0.001)
            os.utime(copy)
            mark = os.stat(copy).st_ctime_ns
        self.handed_ns[copy] = mark

    def return_copy(self, bundle: BlobId, manifest: Manifest, copy: Path, user: str) -> bool:
        """Restore and keep the copy of an ended attempt. Return False if it is not wanted; it is not moved then.

        The attempt may have replaced it by a link to its data: a link is left alone.
        """
        handed_ns = self.handed_ns.pop(copy, None)
        if handed_ns is None:
            return False
        waiting = [name.split(".") for name in self._names()]
        used_bytes = sum(int(each[1]) for each in waiting)
        alike = sum(each[0] == bundle for each in waiting)
        if used_bytes + manifest.size_bytes > COPIES_LIMIT_BYTES or alike >= COPIES_LIMIT:
            return False
        try:
            if not stat.S_ISDIR(os.lstat(copy).st_mode) or not unmount(copy):
                return False
            # The machine's clock was set back meanwhile: times of changes prove nothing.
            os.utime(copy)
            if os.stat(copy).st_ctime_ns < handed_ns:
                return False
            self.prune(manifest, copy, handed_ns)
            name = f"{bundle}.{manifest.size_bytes}.{_user_mark(user)}.{handed_ns}.{os.urandom(6).hex()}"
            os.rename(copy, self.root / name)
        except OSError:
            return False  # on another file system, or impossible to restore
        return True

    def take(self, bundle: BlobId, into: Path, user: str) -> int | None:
        """Move a copy of ``user`` to ``into``, if there is one; return its time for `prune`."""
        for name in self._names():
            parts = name.split(".")
            if (parts[0], parts[2]) == (bundle, _user_mark(user)):
                with suppress(OSError):  # another node of the machine took it first
                    os.rename(self.root / name, into)
                    return int(parts[3])
        return None

    def newest(self, user: str) -> list[BlobId]:
        """Return the bundles of the copies that attempts of ``user`` have returned last, at most `LOOK_AT`."""
        ages = []
        for name in self._names():
            parts = name.split(".")
            if parts[2] == _user_mark(user):
                with suppress(OSError):
                    ages.append((os.stat(self.root / name).st_ctime, parts[0]))
        return list(dict.fromkeys(bundle for _, bundle in sorted(ages, reverse=True)))[:LOOK_AT]

    def drop(self, unless: Callable[[BlobId], bool]) -> None:
        """Remove the copies of all bundles for which ``unless`` returns False."""
        for name in self._names():
            if not unless(name.partition(".")[0]):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.root) if name.count(".") == 4]
        except FileNotFoundError:
            return []

    def prune(self, manifest: Manifest, root: Path, handed_ns: int) -> set[str]:
        """Remove everything that differs from the manifest, or was changed since ``handed_ns``. Return the paths of the
        remaining files. Raises OSError."""
        wanted = {entry.path: entry for entry in manifest.files}
        directories = {above for entry in manifest.files for above in _ancestors(entry.path)}
        unchanged: set[str] = set()
        below = [""]
        while below:
            place = below.pop()
            # The attempt may have taken away its own permissions.
            os.chmod(root / place, 0o700)
            with os.scandir(root / place) as entries:
                for found in entries:
                    path = f"{place}{found.name}"
                    if not found.is_dir(follow_symlinks=False):
                        entry = wanted.get(path)
                        if entry is not None and self._is_unchanged(found, entry, handed_ns):
                            unchanged.add(path)
                        else:
                            os.unlink(found.path)
                    elif path in directories:
                        below.append(f"{path}/")
                    else:
                        remove(Path(found.path))
        return unchanged

    def _is_unchanged(self, found: os.DirEntry[str], entry: FileEntry, handed_ns: int) -> bool:
        if entry.mode == LINK:
            return False  # there are few links: they are created again
        seen = found.stat(follow_symlinks=False)
        executable = bool(seen.st_mode & stat.S_IXUSR) is (entry.mode == PROGRAM)
        # Size and modification time can be put back, the time of the last change cannot. By a second link the owner of
        # the ended attempt could still change it.
        own = seen.st_nlink == 1 and bool(seen.st_mode & stat.S_IWUSR) and seen.st_ctime_ns < handed_ns
        return stat.S_ISREG(seen.st_mode) and executable and own and self.is_untouched(seen, entry)


def _user_mark(user: str) -> str:
    return hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _ancestors(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
