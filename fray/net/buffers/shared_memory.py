"""Memory shared by processes of one host: files below /dev/shm, reused while warm, lent and returned.

A lending process has one private directory with a random name, locked as long as it lives
(`fray.net.buffers.segment_directories`). A peer that proves that it can read the nonce there
(`fray.net.buffers.mapped_segments`) is on the same host and may map the files in it, and no others. Fresh pages cost
several times as much as warm ones (10 MB: 1.7 against 4 to 8 GB/s), so a returned segment is filled again
(`fray.net.buffers.segment_allocator` does the bookkeeping); a segment that was free for `IDLE_S` is removed.
Directories of dead processes are removed by `sweep`.

An array on a segment is a view of an exporter made by `export`; when the last view is removed the exporter is, and a
callback ends the use, in whichever thread that happens.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import secrets
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from attrs import define

from fray.errors import ProtocolMismatch
from fray.net.buffers import segment_directories
from fray.net.buffers.segment_allocator import SegmentAllocator, capacity_for
from fray.net.buffers.segment_directories import NAME_BYTES, NONCE

SEGMENT_FROM_BYTES = 256 * 1024
"""Smallest buffer that is lent: below, a loan costs more than the copies it saves."""
LIMIT_BYTES = 4 * 1024**3
"""Limit of one process's segments; set by FRAY_SEGMENT_POOL_BYTES, 0 to use none."""
IDLE_S = 5.0
# Data loaders and collective libraries of the same machine use /dev/shm too, and fail when it is full.
SPARE_BYTES = 64 * 1024 * 1024
"""Bytes left free in the file system."""
# Some 0.4 ms. With steps of 1 MiB, the checkpoints between them cost as much as the copy of 100 MB.
STEP_BYTES = 4 * 1024 * 1024
HUGE_FROM_BYTES = 4 * 1024 * 1024
CHAIN_LIMIT = 8
"""Number of arrays and views that may lie over one another."""


def allocate_receive_buffer(size_bytes: int) -> bytearray | memoryview:
    """Return private memory to receive into. Large blocks use huge pages, which makes fresh memory cost a third."""
    if size_bytes < HUGE_FROM_BYTES:
        return bytearray(size_bytes)
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not all kernels have huge pages; normal ones are only slower.
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)


def export(mapping: mmap.mmap, offset: int, size: int) -> Any:
    """Return an object that every view of these bytes references; before 3.12 only ctypes has such a class."""
    import ctypes  # imported late: it takes milliseconds, and most processes never share memory

    return (ctypes.c_ubyte * size).from_buffer(mapping, offset)


@define(eq=False)
class _Segment:
    number: int
    capacity: int
    fd: int
    mapping: mmap.mmap
    filled: int = 0
    """Bytes that have pages; beyond them, the file system may be full."""

    def fill(self, data: memoryview) -> Iterator[None]:
        """Copy in steps, yielding between them so that other tasks can run. Raises OSError: file system full."""
        size, warm, at = len(data), min(self.filled, len(data)), 0
        # Warm pages are copied through the mapping, without a system call per step.
        while at < warm:
            upto = min(at + STEP_BYTES, warm)
            self.mapping[at:upto] = data[at:upto]
            at = upto
            yield
        # Fresh ones are written: a full file system is then an OSError, whereas touching its mapping would be a SIGBUS.
        while at < size:
            at += os.pwrite(self.fd, data[at : at + STEP_BYTES], at)
            yield
        self.filled = max(self.filled, size)


class Snapshot:
    """Copy of some bytes in a segment of this process, which stays in use as long as this or a view of it lives."""

    __slots__ = ("_exporter", "number", "size")

    def __init__(self, number: int, size: int, exporter: Any) -> None:
        self.number = number
        self.size = size
        self._exporter = exporter

    @property
    def view(self) -> memoryview:
        return memoryview(self._exporter).cast("B")


class SegmentPool:
    """Segments that this process lends. All methods may be called from any thread.

    Raises (when made):
        OSError: no file system for segments.
    """

    def __init__(self, limit_bytes: int, bases: tuple[str, ...] | None = None) -> None:
        self.directory, self._lock_fd = segment_directories.make(bases or segment_directories.bases())
        self.nonce = secrets.token_hex(NAME_BYTES)
        with open(os.path.join(self.directory, NONCE), "x", opener=segment_directories.private) as file:
            file.write(self.nonce)
        space = os.statvfs(self.directory)
        # At most half of what is free: other processes of this machine have pools of their own.
        self._allocator = SegmentAllocator(min(limit_bytes, space.f_bavail * space.f_frsize // 2), IDLE_S)
        self._segments: dict[int, _Segment] = {}
        self._mutex = threading.Lock()
        self._uses_ended: deque[int] = deque()
        """Segments with an ended use, added by finalizers, which may run anywhere and must not lock."""
        self._views: dict[int, weakref.ref[Any]] = {}
        self._unsealed: dict[int, int] = {}
        """Segments that code fills itself, by the `id` of their exporter."""
        self._closed = False
        self.on_removed: list[Callable[[list[int]], None]] = []
        """Callbacks with the numbers of removed segments; called without a lock, in any thread."""

    def __repr__(self) -> str:
        return f"<Pool {self.directory}: {len(self._allocator)} segments, {self._allocator.held_bytes} bytes>"

    @property
    def held_bytes(self) -> int:
        """Bytes of all segments, used and free."""
        return self._allocator.held_bytes

    @property
    def used(self) -> int:
        """Number of segments in use."""
        with self._mutex:
            removed = self._end_recorded_uses()
            self._remove(removed)
            used = sum(entry.uses > 0 for entry in self._allocator.entries.values())
        self._notify_removed(removed)
        return used

    @property
    def limit_bytes(self) -> int:
        """Limit of the bytes of all segments."""
        return self._allocator.limit_bytes

    def allocate(self, size: int) -> memoryview | None:
        """Return a segment's memory for code that fills it itself, then calls `seal`; None: no room."""
        segment = self._take(size)
        if segment is None:
            return None
        try:
            # All pages now: where the file system is full, touching the mapping later would be a SIGBUS.
            if segment.filled < size:
                os.posix_fallocate(segment.fd, 0, size)
                segment.filled = size
        except OSError:
            self.drop(segment.number, spoil=True)
            return None
        snapshot = self._snapshot(segment, 0, size)
        self._unsealed[id(snapshot._exporter)] = segment.number
        return snapshot.view

    def seal(self, exporter: Any) -> Snapshot | None:
        """Return the allocated memory that belongs to this exporter as a snapshot; None: it was not allocated, or was
        sealed before."""
        number = self._unsealed.pop(id(exporter), None)
        return None if number is None else Snapshot(number, len(exporter), exporter)

    def store(self, data: memoryview) -> Snapshot | None:
        """Return a copy of these bytes; None when the pool or its file system is full."""
        steps = self.store_in_steps(data)
        for snapshot in steps:
            if snapshot is not None:
                return snapshot
        return None

    def store_in_steps(self, data: memoryview) -> Iterator[Snapshot | None]:
        """Copy in steps of a fraction of a millisecond: yield None between them, and the copy last, if it fits."""
        segment = self._take(len(data))
        if segment is None:
            return
        # In steps, because a copy of 1 GB would stall the event loop for 0.2 s or more.
        done = False
        try:
            for _ in segment.fill(data):
                yield None
            done = True
        except OSError:
            return
        finally:
            if not done:
                # Removed at once, which gives its pages back: the file system may be full, or the caller has stopped
                # half-way.
                self.drop(segment.number, spoil=True)
        yield self._snapshot(segment, 0, len(data))

    def reopen(self, number: int, offset: int, size: int) -> Snapshot:
        """Return a view of a used segment that a borrower returns with its content; counts as a use of its own.

        Raises:
            ProtocolMismatch: no such segment, or outside of it.
        """
        with self._mutex:
            segment = self._segments.get(number)
            # All three numbers are the borrower's word.
            if segment is None or offset < 0 or size <= 0 or offset + size > segment.capacity:
                raise ProtocolMismatch(f"the peer returns bytes of segment {number}, which it has not borrowed")
            self._allocator.hold(number)
        return self._snapshot(segment, offset, size)

    def hold(self, number: int) -> None:
        """Count one more use of a segment in use; ended by `drop`."""
        with self._mutex:
            self._allocator.hold(number)

    def drop(self, number: int, *, spoil: bool = False) -> None:
        """End a use. ``spoil``: the segment may still have readers, so it must never be filled again."""
        with self._mutex:
            # Finalizers cannot take the mutex, so the uses they have recorded end with the next operation.
            removed = self._end_recorded_uses()
            if self._allocator.drop(number, time.monotonic(), spoil=spoil):
                removed.append(number)
            self._remove(removed)
        self._notify_removed(removed)

    def trim(self, *, all_free: bool = False) -> None:
        """Return idle segments to the system."""
        with self._mutex:
            removed = self._end_recorded_uses()
            # Idle segments are kept for some seconds, since fresh pages cost several times as much as warm ones.
            removed += self._allocator.trim(float("inf") if all_free else time.monotonic())
            self._remove(removed)
        self._notify_removed(removed)

    def close(self) -> None:
        """Remove the directory. Mapped segments stay readable."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock_fd)

    def _take(self, size: int) -> _Segment | None:
        with self._mutex:
            removed = self._end_recorded_uses()
            number = self._allocator.take(size)
            if number is None:
                capacity = capacity_for(size)
                # After the close nothing new is made: the directory is gone.
                victims = self._allocator.make_room(capacity) if not self._closed else None
                removed += victims or []
                segment = self._make(capacity) if victims is not None else None
            else:
                segment = self._segments[number]
            self._remove(removed)
        # Outside of the mutex: a callback may send, and so store or drop other segments.
        self._notify_removed(removed)
        return segment

    def _make(self, capacity: int) -> _Segment | None:
        # Looked up each time: the file system is shared, and files are sparse until they are filled.
        space = os.statvfs(self.directory)
        if space.f_bavail * space.f_frsize < capacity + SPARE_BYTES:
            return None
        number, fd = self._allocator.add(capacity), -1
        try:
            fd = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.ftruncate(fd, capacity)
            mapping = mmap.mmap(fd, capacity)
        except OSError:
            if fd >= 0:
                os.close(fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(number))
            self._allocator.drop(number, 0.0, spoil=True)
            return None
        segment = self._segments[number] = _Segment(number, capacity, fd, mapping)
        return segment

    def _snapshot(self, segment: _Segment, offset: int, size: int) -> Snapshot:
        exporter = export(segment.mapping, offset, size)
        key, number = id(exporter), segment.number

        def ended(_: object) -> None:
            del self._views[key]
            self._unsealed.pop(key, None)
            # Finalizers run in any thread, perhaps while it holds the mutex. Appending to a deque is atomic and needs
            # none.
            self._uses_ended.append(number)

        self._views[key] = weakref.ref(exporter, ended)
        return Snapshot(number, size, exporter)

    def _end_recorded_uses(self) -> list[int]:
        """End the uses recorded by finalizers; return segments to delete."""
        removed = []
        while self._uses_ended:
            number = self._uses_ended.popleft()
            if self._allocator.drop(number, time.monotonic()):
                removed.append(number)
        return removed

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            segment = self._segments.pop(number, None)
            if segment is not None:
                os.close(segment.fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(number))

    def _notify_removed(self, removed: list[int]) -> None:
        if removed:
            for callback in list(self.on_removed):
                callback(removed)

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, str(number))


_pool: SegmentPool | None = None
_unavailable = False
_making = threading.Lock()


def pool() -> SegmentPool | None:
    """Return this process's pool, created when first needed; None where it cannot be used."""
    global _pool, _unavailable
    if _pool is None and not _unavailable:
        # Checked again inside: two threads may have found no pool at the same time.
        with _making:
            if _pool is None and not _unavailable:
                try:
                    limit = limit_bytes()
                    _pool = SegmentPool(limit) if limit > 0 else None
                    sweep()
                except (OSError, ValueError):
                    _pool = None
                _unavailable = _pool is None
                if _pool is not None:
                    atexit.register(_pool.close)
    return _pool


def seal(view: memoryview) -> Snapshot | None:
    """Return the memory of `SegmentPool.allocate` that ``view`` spans, as a snapshot; None if it does not.

    A view of a part is copied like any other memory.
    """
    found: Any = view
    # An array refers to the memory below it by `base`, a view by `obj`; the chain ends at the exporter.
    for _ in range(CHAIN_LIMIT):
        below = found.obj if isinstance(found, memoryview) else getattr(found, "base", None)
        if below is None:
            break
        found = below
    if _pool is None or not hasattr(type(found), "_length_") or len(found) != len(view):
        return None
    return _pool.seal(found)


def limit_bytes() -> int:
    """Return the limit of this process's segments; 0: it neither lends nor borrows any.

    Raises:
        ValueError: FRAY_SEGMENT_POOL_BYTES is not a number.
    """
    return int(os.environ.get("FRAY_SEGMENT_POOL_BYTES") or LIMIT_BYTES)


def known_pool() -> SegmentPool | None:
    """Return the pool, if it has been created."""
    return _pool


def sweep(bases: tuple[str, ...] | None = None, *, uid: int | None = None) -> int:
    """Remove directories of dead processes of a user; return how many. None: of this process's user."""
    return segment_directories.sweep(bases or segment_directories.bases(), uid)


def _forget_after_fork() -> None:
    global _pool, _unavailable, _making
    if _pool is not None:
        # The directory is the parent's, and a child that exits must not remove it.
        atexit.unregister(_pool.close)
    # A new lock, since another thread of the parent may have held the old one at the fork.
    _pool, _unavailable, _making = None, False, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
