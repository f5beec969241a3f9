"""Workspaces on a machine's disk, for all nodes there: each file's contents once, and a tree for each bundle.

Directories: ``files/`` has each content under its SHA-256, read-only; ``trees/`` has the bundles, whose files are hard
links to those; ``chunks/`` the chunks fetched for trees that are not complete yet; ``locks/`` a file per bundle;
``copies/`` the reusable copies of ended attempts.

Invariants: whatever has its final name is complete. A tree is built under another name and renamed, so the remains of a
crash are recognized by their name and removed. Nothing is synced to the disk: instead, the store is emptied after a
reboot. A user of a tree holds its lock shared, a process that builds or removes it exclusively; a process that adds to
``files/`` holds the store's lock shared, one that removes from it exclusively. The modification time of a file encodes
its content's hash, so a file that was written to is recognized without reading it.

All functions block; `fray.node.workspaces.preparer` calls them in threads.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from fray.errors import InvalidRequest
from fray.model.ids import BlobId
from fray.model.workspace import (
    LINK,
    PROGRAM,
    FileEntry,
    Manifest,
    ManifestChunk,
    file_spans,
    find_escape,
    is_outside,
    read_manifest,
    unpack_chunk,
    write_manifest,
)
from fray.net.atomic_file import write_atomically
from fray.node.workspaces.reusable_copies import ReusableCopies

CLONED_FROM_BYTES = 1 << 20
"""Files from this size on share their blocks with the store, where the file system can do that."""
SETTLED_S = 1.0
"""Age of a change from which on a later one surely has another time."""
_FICLONE = 0x40049409
_FIRST_TIME_S = 1_600_000_000
_COPY_BYTES = 1 << 20


class TreeCorrupted(Exception):
    """A file of a tree was changed after the tree was built, or its content does not match its hash."""


@frozen
class WorkspaceRetention:
    """Limits for the store of a machine: bytes in ``files/``, and seconds since the last use of a tree."""

    limit_bytes: int = 20 * 1000**3
    unused_s: float = 14 * 86_400.0


class WorkspaceStore:
    """Workspace store in one directory, which `open` creates."""

    def __init__(self, root: Path, boot_id: str = "") -> None:
        self.root = root
        self._boot_id = boot_id
        self._files, self._trees, self._chunks = root / "files", root / "trees", root / "chunks"
        self._locks = root / "locks"
        self._reusable = ReusableCopies(root / "copies", is_untouched)
        self._verified: dict[BlobId, tuple[int, int]] = {}
        """Inode and time of the last change (ctime, ns) of contents whose hash this process has checked."""

    def open(self) -> None:
        """Create the directories, and empty them if the machine was rebooted since."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self.root / "lock", fcntl.LOCK_EX):
            # Nothing is synced, so a crash of the machine may have left files with the right name and size and no
            # contents.
            mark = self.root / "boot"
            if not mark.exists() or mark.read_text() != self._boot_id:
                for directory in self._directories:
                    remove(directory)
                mark.write_text(self._boot_id)
            for directory in self._directories:
                directory.mkdir(exist_ok=True, mode=0o700)

    @property
    def _directories(self) -> tuple[Path, ...]:
        return self._files, self._trees, self._chunks, self._locks, self._reusable.root

    # Locks

    def try_lock(self, bundle: BlobId, how: int) -> int | None:
        """Acquire the bundle's lock (`fcntl.LOCK_SH` or `LOCK_EX`). Return a descriptor to close, or None while other
        processes hold it."""
        path = self._locks / bundle
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # The file may have been removed with its tree between open and flock: a lock on it would protect nothing.
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                # The time of the last use, by which trees are evicted.
                os.utime(descriptor)
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # held by other processes, or removed together with its tree
        os.close(descriptor)
        return None

    # Trees

    def tree(self, bundle: BlobId) -> Path:
        return self._trees / bundle

    def has(self, bundle: BlobId) -> bool:
        return self.tree(bundle).is_dir()

    def manifest(self, bundle: BlobId) -> Manifest:
        return read_manifest((self._trees / f"{bundle}.json").read_bytes())

    def missing(self, manifest: Manifest) -> list[ManifestChunk]:
        """Return the chunks that have content of missing files and are missing themselves."""
        numbers = {
            span.chunk for entry, where in file_spans(manifest) if where and not self._is_whole(entry) for span in where
        }
        return [
            manifest.chunks[number] for number in sorted(numbers) if not self.has_chunk(manifest.chunks[number].blob)
        ]

    def has_chunk(self, blob: BlobId) -> bool:
        return (self._chunks / blob).exists()

    def put_chunk(self, blob: BlobId, data: bytes) -> None:
        """Keep a chunk until its tree is built."""
        write_atomically(self._chunks / blob, data, concurrent=True)

    def chunk(self, blob: BlobId) -> bytes:
        return (self._chunks / blob).read_bytes()

    def build(self, bundle: BlobId, manifest: Manifest, parts: Iterable[BlobId]) -> Path:
        """Build the tree from the stored chunks and files. The caller holds the bundle's lock exclusively.

        Raises:
            FileNotFoundError: a chunk or file was removed meanwhile; call `missing` again.
            OSError: the disk is full, or another error of the file system.
        """
        draft = self._trees / f"{bundle}.new"
        remove(draft)
        # Shared by builders of different trees; a sweep, which removes unlinked files, needs it exclusively.
        with locked(self.root / "lock", fcntl.LOCK_SH):
            try:
                self._add_missing_files(manifest)
                self._link_tree(manifest, draft)
                write_atomically(self._trees / f"{bundle}.json", write_manifest(manifest), concurrent=True)
                # Last: a tree under its final name is complete.
                draft.rename(self.tree(bundle))
            except BaseException:
                remove(draft)
                raise
        for blob in (*parts, *(chunk.blob for chunk in manifest.chunks)):
            (self._chunks / blob).unlink(missing_ok=True)
        return self.tree(bundle)

    def _add_missing_files(self, manifest: Manifest) -> None:
        """Add the missing contents to ``files/``."""
        unpacked: tuple[int, bytes] = (-1, b"")

        def take(number: int) -> bytes:
            nonlocal unpacked
            if unpacked[0] != number:
                # The last chunk is kept: files are packed one after the other, so neighbours share it.
                unpacked = number, unpack_chunk(manifest.chunks[number], self.chunk(manifest.chunks[number].blob))
            return unpacked[1]

        for entry, where in file_spans(manifest):
            if not self._is_whole(entry):
                contents = (take(span.chunk)[span.at : span.at + span.size_bytes] for span in where)
                self._add_file(entry, contents)

    def _add_file(self, entry: FileEntry, contents: Iterable[bytes]) -> None:
        file, hashed = self._file(entry), hashlib.sha256()

        def hash_each() -> Iterator[bytes]:
            for content in contents:
                hashed.update(content)
                yield content

        mode = 0o555 if entry.mode == PROGRAM else 0o444
        write_atomically(file, hash_each(), mode=mode, time_s=_time_of(entry.blob), concurrent=True)
        # After the write and not before it: files may be larger than memory.
        if hashed.hexdigest() != entry.blob:
            file.unlink()
            raise TreeCorrupted(f"{entry.path!r} arrived corrupted")

    def _link_tree(self, manifest: Manifest, draft: Path) -> None:
        for directory in _directories(draft, manifest.files):
            os.mkdir(directory, 0o700)
        targets = {
            entry.path: _checked_target(entry, self._file(entry).read_bytes())
            for entry in manifest.files
            if entry.mode == LINK
        }
        if (escape := find_escape(targets)) is not None:
            raise InvalidRequest(
                f"symbolic link {escape!r} leads outside the workspace, through other links: {targets[escape]!r}"
            )
        for entry in manifest.files:
            if entry.mode == LINK:
                os.symlink(targets[entry.path], f"{draft}/{entry.path}")
            else:
                os.link(self._file(entry), f"{draft}/{entry.path}")

    def _file(self, entry: FileEntry) -> Path:
        return self._files / f"{entry.blob}{'x' if entry.mode == PROGRAM else ''}"

    def _is_whole(self, entry: FileEntry) -> bool:
        try:
            seen = os.lstat(self._file(entry))
        except FileNotFoundError:
            return False
        return is_untouched(seen, entry)

    # Copies

    def copy(self, bundle: BlobId, into: Path, user: str, *, is_reusable: bool = True) -> None:
        """Copy the tree for one attempt of ``user``, which may write there.

        Large files share their blocks if the file system supports it. Nothing is a link to the store: the owner of a
        file may make it writable again, and would write to the workspaces of others.

        Raises:
            TreeCorrupted: the tree was changed.
        """
        tree, manifest = self.tree(bundle), self.manifest(bundle)
        mark = self._reusable.take(bundle, into, user) or self._take_alike(manifest, into, user)
        unchanged = set() if mark is None else self._reusable.prune(manifest, into, mark)
        for directory in _directories(into, manifest.files):
            os.makedirs(directory, 0o700, exist_ok=True)
        for entry in manifest.files:
            if entry.path in unchanged:
                continue
            source, target = f"{tree}/{entry.path}", f"{into}/{entry.path}"
            try:
                if entry.mode == LINK:
                    os.symlink(self._link_target(source, entry), target)
                else:
                    _copy(source, target, entry, self._verified)
            except FileNotFoundError:
                raise TreeCorrupted(f"{entry.path!r} was removed from the workspace") from None
        if is_reusable:
            self._reusable.hand_out(into)

    def _link_target(self, source: str, entry: FileEntry) -> str:
        target = os.readlink(source)
        # The targets were checked together when the tree was built.
        if hashlib.sha256(os.fsencode(target)).hexdigest() != entry.blob:
            raise TreeCorrupted(f"{entry.path!r} was modified")
        return target

    def _take_alike(self, manifest: Manifest, into: Path, user: str) -> int | None:
        """Take the copy of an earlier version, if one is similar enough: an edit leaves most files unchanged."""
        for other in self._reusable.newest(user):
            with suppress(OSError, InvalidRequest):
                theirs = {(entry.path, entry.blob, entry.mode) for entry in self.manifest(other).files}
                alike = sum((entry.path, entry.blob, entry.mode) in theirs for entry in manifest.files)
                # More than half must be the same, or the copy is hardly worth restoring.
                if alike * 2 > max(len(theirs), len(manifest.files)):
                    return self._reusable.take(other, into, user)
        return None

    def return_copy(self, bundle: BlobId, copy: Path, user: str) -> bool:
        """Keep the copy of an ended attempt of ``user`` for its next one. Return False if it is not wanted."""
        try:
            return self._reusable.return_copy(bundle, self.manifest(bundle), copy, user)
        except (OSError, InvalidRequest):
            return False  # its tree was removed

    def discard_damaged(self, bundle: BlobId) -> None:
        """Remove a corrupted tree and its corrupted contents. The caller holds its lock exclusively."""
        with suppress(OSError, ValueError):
            for entry in self.manifest(bundle).files:
                if not self._has_content(entry):
                    self._file(entry).unlink(missing_ok=True)
        self._remove_tree(bundle)

    def _has_content(self, entry: FileEntry) -> bool:
        """Return whether a content is what its name says, by reading it."""
        if not self._is_whole(entry):
            return False
        origin = os.open(self._file(entry), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _hash_of(origin) == entry.blob
        finally:
            os.close(origin)

    # Eviction

    def sweep(self, retention: WorkspaceRetention) -> int:
        """Remove unused trees over the limits, and the remains of crashes. Return the number of removed trees."""
        removed = 0
        self._reusable.drop(unless=self.has)
        now, ages = time.time(), []
        for lock in list(self._locks.iterdir()):
            with suppress(FileNotFoundError):
                ages.append((now - lock.stat().st_mtime, lock.name))
        used = self._size_bytes()
        for age_s, bundle in sorted(ages, reverse=True):
            if (age_s > retention.unused_s or used > retention.limit_bytes) and self._evict(bundle):
                removed += 1
                self._remove_unlinked()
                used = self._size_bytes() if used > retention.limit_bytes else used
        self._remove_unlinked()
        return removed

    def _evict(self, bundle: BlobId) -> bool:
        descriptor = self.try_lock(bundle, fcntl.LOCK_EX)
        if descriptor is None:
            return False
        try:
            self._remove_tree(bundle)
            remove(self._trees / f"{bundle}.new")
            (self._locks / bundle).unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        return True

    def _remove_tree(self, bundle: BlobId) -> None:
        self._reusable.drop(unless=lambda other: other != bundle)
        old = self._trees / f"{bundle}.old"
        with suppress(FileNotFoundError):
            # Renamed first: a removal that is interrupted must not leave half a tree under the final name.
            self.tree(bundle).rename(old)
        remove(old)
        (self._trees / f"{bundle}.json").unlink(missing_ok=True)

    def _remove_unlinked(self) -> None:
        """Remove contents without a tree and old chunks, unless a process builds a tree at the moment."""
        try:
            with locked(self.root / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
                for entry in os.scandir(self._files):
                    # Trees are hard links, so a file with one link is in use nowhere.
                    if entry.stat(follow_symlinks=False).st_nlink == 1:
                        os.unlink(entry.path)
                for entry in os.scandir(self._chunks):
                    if time.time() - entry.stat().st_mtime > 86_400:
                        os.unlink(entry.path)
        except BlockingIOError:
            return

    def _size_bytes(self) -> int:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(self._files))


def _checked_target(entry: FileEntry, content: bytes) -> str:
    """Return the target of a symbolic link, checked: the manifest may come from a malicious client."""
    target = os.fsdecode(content)
    if "\0" in target or is_outside(entry.path, target):
        raise InvalidRequest(f"symbolic link {entry.path!r} points outside the workspace: {target!r}")
    return target


def is_untouched(seen: os.stat_result, entry: FileEntry) -> bool:
    return seen.st_size == entry.size_bytes and seen.st_mtime == _time_of(entry.blob)


def _time_of(blob: BlobId) -> int:
    """Return the modification time for a content, in seconds: a write to the file changes it."""
    return _FIRST_TIME_S + int(blob[:6], 16)


def _directories(root: Path, files: Sequence[FileEntry]) -> list[str]:
    """Return all directories to create, parents first."""
    found = {""}
    for entry in files:
        above = entry.path.rpartition("/")[0]
        while above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return [f"{root}/{each}" if each else str(root) for each in sorted(found)]


def _copy(source: str, target: str, entry: FileEntry, verified: dict[BlobId, tuple[int, int]]) -> None:
    origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _verify(origin, entry, verified)
        with _created_file(target, entry) as copy:
            if not (entry.size_bytes >= CLONED_FROM_BYTES and _clone_file(origin, copy)):
                _copy_bytes(origin, copy)
    finally:
        os.close(origin)


def _verify(origin: int, entry: FileEntry, verified: dict[BlobId, tuple[int, int]]) -> None:
    """Check that a file of the store has its content still, by reading it once after each change of it.

    Raises:
        TreeCorrupted: it was changed.
    """
    seen = os.fstat(origin)
    if is_untouched(seen, entry) and verified.get(entry.blob) == (seen.st_ino, seen.st_ctime_ns):
        return
    # Size and modification time can be put back by each process that may write to the store: on most machines all jobs.
    began = time.time()
    if not is_untouched(seen, entry) or _hash_of(origin) != entry.blob:
        raise TreeCorrupted(f"{entry.path!r} was modified")
    # A change in the same tick of the clock would not show in its time.
    if seen.st_ctime < began - SETTLED_S:
        verified[entry.blob] = seen.st_ino, seen.st_ctime_ns


def _hash_of(origin: int) -> str:
    hashed = hashlib.sha256()
    at = 0
    while data := os.pread(origin, _COPY_BYTES, at):
        hashed.update(data)
        at += len(data)
    return hashed.hexdigest()


@contextmanager
def _created_file(target: str, entry: FileEntry) -> Iterator[int]:
    mode = 0o755 if entry.mode == PROGRAM else 0o644
    copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        yield copy
        os.utime(copy, (_time_of(entry.blob), _time_of(entry.blob)))
    finally:
        os.close(copy)


def _clone_file(origin: int, copy: int) -> bool:
    """Clone the file if the file system can (btrfs, xfs): blocks are shared until one of the two is written to."""
    try:
        fcntl.ioctl(copy, _FICLONE, origin)
    except OSError:
        return False
    return True


def _copy_bytes(origin: int, copy: int) -> None:
    left = os.fstat(origin).st_size - os.fstat(copy).st_size
    try:
        while left > 0 and (count := os.copy_file_range(origin, copy, left)):
            left -= count
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            raise
    if left > 0:
        os.lseek(origin, -left, os.SEEK_END)
        while data := os.read(origin, _COPY_BYTES):
            os.write(copy, data)


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock file. Raises BlockingIOError with ``LOCK_NB``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
