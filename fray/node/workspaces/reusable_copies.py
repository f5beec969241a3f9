"""Copies of workspaces that attempts have left: made whole again, and given to the next.

Law: what an attempt has changed, added or removed is undone before anybody gets the copy again; a file is as it was if
its kind, bits, size, time (which says which content it is) and number of links are. Making ten thousand files costs a
file system 0.3 to 4 seconds, looking at them 0.1. Everything here blocks.
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
"""Of all copies that wait for an attempt."""
COPIES_LIMIT = 8
"""Of one workspace."""
LOOK_AT = 3
"""Other workspaces among which an earlier version of this one is looked for."""

IsWhole: TypeAlias = Callable[[os.stat_result, FileEntry], bool]


@define
class ReusableCopies:
    """``{bundle}.{bytes}.{token}`` below one directory of the store."""

    root: Path
    is_whole: IsWhole
    """Of size and time."""

    def return_copy(self, bundle: BlobId, manifest: Manifest, copy: Path) -> bool:
        """Take a copy nobody works in any more; False if it is not wanted, and still where it was.

        What stands in its place may be a link to the data of its author: nothing is undone there.
        """
        waiting = [name.split(".") for name in self._names()]
        held = sum(int(size) for _, size, _ in waiting)
        alike = sum(name == bundle for name, _, _ in waiting)
        if held + manifest.size_bytes > COPIES_LIMIT_BYTES or alike >= COPIES_LIMIT:
            return False
        try:
            if not stat.S_ISDIR(os.lstat(copy).st_mode) or not unmount(copy):
                return False
            self.prune(manifest, copy)
            os.rename(copy, self.root / f"{bundle}.{manifest.size_bytes}.{os.urandom(6).hex()}")
        except OSError:
            return False  # on another file system, or damaged beyond what can be undone
        return True

    def take(self, bundle: BlobId, into: Path) -> bool:
        """Move a copy to ``into``, if there is one."""
        for name in self._names():
            if name.startswith(f"{bundle}."):
                with suppress(OSError):  # somebody else was first
                    os.rename(self.root / name, into)
                    return True
        return False

    def newest(self) -> list[BlobId]:
        """The bundles of the last few that were given back."""
        ages = []
        for name in self._names():
            with suppress(OSError):
                ages.append((os.stat(self.root / name).st_ctime, name.partition(".")[0]))
        return list(dict.fromkeys(bundle for _, bundle in sorted(ages, reverse=True)))[:LOOK_AT]

    def drop(self, unless: Callable[[BlobId], bool]) -> None:
        """Remove those of bundles of which this is not true."""
        for name in self._names():
            if not unless(name.partition(".")[0]):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.root) if name.count(".") == 2]
        except FileNotFoundError:
            return []

    def prune(self, manifest: Manifest, root: Path) -> set[str]:
        """Remove all that is not as it was; the paths of files that are left. Raises OSError."""
        wanted = {entry.path: entry for entry in manifest.files}
        directories = {above for entry in manifest.files for above in _above(entry.path)}
        whole: set[str] = set()
        below = [""]
        while below:
            place = below.pop()
            os.chmod(root / place, 0o700)
            with os.scandir(root / place) as entries:
                for found in entries:
                    path = f"{place}{found.name}"
                    if not found.is_dir(follow_symlinks=False):
                        entry = wanted.get(path)
                        if entry is not None and self._is_as_it_was(found, entry):
                            whole.add(path)
                        else:
                            os.unlink(found.path)
                    elif path in directories:
                        below.append(f"{path}/")
                    else:
                        remove(Path(found.path))
        return whole

    def _is_as_it_was(self, found: os.DirEntry[str], entry: FileEntry) -> bool:
        if entry.mode == LINK:
            return False  # there are few, and they are made anew
        seen = found.stat(follow_symlinks=False)
        executable = bool(seen.st_mode & stat.S_IXUSR) is (entry.mode == PROGRAM)
        own = seen.st_nlink == 1 and bool(seen.st_mode & stat.S_IWUSR)  # a link elsewhere would be a way in
        shared = seen.st_nlink > 1 and not seen.st_mode & 0o222
        return stat.S_ISREG(seen.st_mode) and executable and (own or shared) and self.is_whole(seen, entry)


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
