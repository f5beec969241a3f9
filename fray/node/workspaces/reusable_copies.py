"""Reusable copies of workspaces: left by ended attempts, restored and given to the next attempts.

Invariant: all that an attempt has changed, added or removed is undone before another attempt gets the copy; a file is
unchanged if its kind, mode, size, modification time (which encodes its content) and number of links are. All functions
block.

Creating ten thousand files costs a file system 0.3 to 4 seconds (ext4 avoids inodes that were just freed), checking
them 0.1. Measured with 10,000 files of 4 KB: without this module, a second start on a machine takes 3 times as long,
and a start after the edit of one file 5 times.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from attrs import define

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
    """The copies in one directory of the store, named ``{bundle}.{bytes}.{token}``."""

    root: Path
    is_untouched: IsUntouched
    """Checks size and modification time of a file."""

    def return_copy(self, bundle: BlobId, manifest: Manifest, copy: Path) -> bool:
        """Restore and keep the copy of an ended attempt. Return False if it is not wanted; it is not moved then.

        The attempt may have replaced it by a link to its data: a link is left alone.
        """
        waiting = [name.split(".") for name in self._names()]
        used_bytes = sum(int(size) for _, size, _ in waiting)
        alike = sum(name == bundle for name, _, _ in waiting)
        if used_bytes + manifest.size_bytes > COPIES_LIMIT_BYTES or alike >= COPIES_LIMIT:
            return False
        try:
            if not stat.S_ISDIR(os.lstat(copy).st_mode) or not unmount(copy):
                return False
            self.prune(manifest, copy)
            os.rename(copy, self.root / f"{bundle}.{manifest.size_bytes}.{os.urandom(6).hex()}")
        except OSError:
            return False  # on another file system, or impossible to restore
        return True

    def take(self, bundle: BlobId, into: Path) -> bool:
        """Move a copy to ``into``, if there is one."""
        for name in self._names():
            if name.startswith(f"{bundle}."):
                with suppress(OSError):  # another node of the machine took it first
                    os.rename(self.root / name, into)
                    return True
        return False

    def newest(self) -> list[BlobId]:
        """Return the bundles of the copies that were returned last, at most `LOOK_AT`."""
        ages = []
        for name in self._names():
            with suppress(OSError):
                ages.append((os.stat(self.root / name).st_ctime, name.partition(".")[0]))
        return list(dict.fromkeys(bundle for _, bundle in sorted(ages, reverse=True)))[:LOOK_AT]

    def drop(self, unless: Callable[[BlobId], bool]) -> None:
        """Remove the copies of all bundles for which ``unless`` returns False."""
        for name in self._names():
            if not unless(name.partition(".")[0]):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.root) if name.count(".") == 2]
        except FileNotFoundError:
            return []

    def prune(self, manifest: Manifest, root: Path) -> set[str]:
        """Remove everything that differs from the manifest. Return the paths of the remaining files. Raises OSError."""
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
                        if entry is not None and self._is_unchanged(found, entry):
                            unchanged.add(path)
                        else:
                            os.unlink(found.path)
                    elif path in directories:
                        below.append(f"{path}/")
                    else:
                        remove(Path(found.path))
        return unchanged

    def _is_unchanged(self, found: os.DirEntry[str], entry: FileEntry) -> bool:
        if entry.mode == LINK:
            return False  # there are few links: they are created again
        seen = found.stat(follow_symlinks=False)
        executable = bool(seen.st_mode & stat.S_IXUSR) is (entry.mode == PROGRAM)
        # A writable file with a second link could still be changed by the ended attempt's owner through that link.
        own = seen.st_nlink == 1 and bool(seen.st_mode & stat.S_IWUSR)
        shared = seen.st_nlink > 1 and not seen.st_mode & 0o222
        return stat.S_ISREG(seen.st_mode) and executable and (own or shared) and self.is_untouched(seen, entry)


def _ancestors(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
