"""Memory that processes of one host share: files below /dev/shm, reused while warm, lent and given back.

A process that lends has one directory of its own, with a random name, for its user alone, and locked as long as it
lives (`fray.net.buffers.segment_directories`). Whoever proves that it can read the nonce there
(`fray.net.buffers.mapped_segments`) is on the same
host and may map the files in it, and no others. Fresh pages cost several times as much as warm ones, so a segment that
came back is filled again (`fray.net.buffers.segment_allocator` keeps the books); one that was free for `IDLE_S` goes.
What a dead process
leaves, `sweep` removes.

An array on a segment is a view of an exporter made by `export`; when the last view is gone the exporter is, and a
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
from fray.net.buffers.segment_directories import BASES, NAME_BYTES, NONCE

SEGMENT_FROM_BYTES = 256 * 1024
"""Below, the loan costs more than the copies it saves."""
LIMIT_BYTES = 4 * 1024**3
"""Of one process's segments; set FRAY_SEGMENT_POOL_BYTES for another bound, 0 to use none."""
IDLE_S = 5.0
SPARE_BYTES = 64 * 1024 * 1024
"""So much is left free in the file system."""
PIECE_BYTES = 4 * 1024 * 1024
HUGE_FROM_BYTES = 4 * 1024 * 1024


def allocate_receive_buffer(size_bytes: int) -> bytearray | memoryview:
    """Private memory to receive into. Large blocks ask for huge pages, which makes fresh memory cost a third."""
    if size_bytes < HUGE_FROM_BYTES:
        return bytearray(size_bytes)
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)


def export(mapping: mmap.mmap, offset: int, size: int) -> Any:
    """An object of which every view of these bytes holds a reference; ctypes has the only such class before 3.12."""
    import ctypes  # late: it costs milliseconds, and most processes never share memory

    return (ctypes.c_ubyte * size).from_buffer(mapping, offset)


@define(eq=False)
class _Segment:
    number: int
    capacity: int
    fd: int
    mapping: mmap.mmap
    filled: int = 0
    """Bytes that have pages; beyond, the file system may turn out to be full."""

    def fill(self, data: memoryview) -> Iterator[None]:
        """Copy, piece by piece: others get a turn between two. Raises: OSError when the file system is full."""
        size, warm, at = len(data), min(self.filled, len(data)), 0
        while at < warm:
            upto = min(at + PIECE_BYTES, warm)
            self.mapping[at:upto] = data[at:upto]
            at = upto
            yield
        while at < size:
            at += os.pwrite(self.fd, data[at : at + PIECE_BYTES], at)
            yield
        self.filled = max(self.filled, size)


class Snapshot:
    """A copy of some bytes in a segment of ours; the segment stays in use as long as this or a view of it lives."""

    __slots__ = ("_exporter", "number", "size")

    def __init__(self, number: int, size: int, exporter: Any) -> None:
        self.number = number
        self.size = size
        self._exporter = exporter

    @property
    def view(self) -> memoryview:
        return memoryview(self._exporter).cast("B")


class SegmentPool:
    """The segments this process lends. All methods may be called from any thread.

    Raises (when made):
        OSError: there is no place for segments here.
    """

    def __init__(self, limit_bytes: int, bases: tuple[str, ...] = BASES) -> None:
        self.directory, self._lock_fd = segment_directories.make(bases)
        self.nonce = secrets.token_hex(NAME_BYTES)
        with open(os.path.join(self.directory, NONCE), "x", opener=segment_directories.private) as file:
            file.write(self.nonce)
        room = os.statvfs(self.directory)
        self._shelf = SegmentAllocator(min(limit_bytes, room.f_bavail * room.f_frsize // 2), IDLE_S)
        self._segments: dict[int, _Segment] = {}
        self._mutex = threading.Lock()
        self._uses_ended: deque[int] = deque()
        """Told by finalizers, which may run anywhere and must not lock."""
        self._views: dict[int, weakref.ref[Any]] = {}
        self._closed = False
        self.on_removed: list[Callable[[list[int]], None]] = []
        """Told the numbers of segments that were thrown away; called with no lock held, in any thread."""

    def __repr__(self) -> str:
        return f"<Pool {self.directory}: {len(self._shelf)} segments, {self._shelf.held_bytes} bytes>"

    @property
    def held_bytes(self) -> int:
        """Of all segments, used and free."""
        return self._shelf.held_bytes

    @property
    def used(self) -> int:
        """How many segments are in use."""
        with self._mutex:
            self._settle()
            return sum(entry.uses > 0 for entry in self._shelf.entries.values())

    def store(self, data: memoryview) -> Snapshot | None:
        """A copy of these bytes; None when the pool or its file system is full."""
        keeping = self.store_in_steps(data)
        for kept in keeping:
            if kept is not None:
                return kept
        return None

    def store_in_steps(self, data: memoryview) -> Iterator[Snapshot | None]:
        """`keep` in pieces of a fraction of a millisecond: yields None between them, the copy last, if there is one."""
        segment = self._take(len(data))
        if segment is None:
            return
        done = False
        try:
            for _ in segment.fill(data):
                yield None
            done = True
        except OSError:
            return
        finally:
            if not done:
                self.drop(segment.number, spoil=True)
        yield self._snapshot(segment, 0, len(data))

    def reopen(self, number: int, offset: int, size: int) -> Snapshot:
        """A view of a segment in use that a borrower hands back with its content; counts as a use of its own.

        Raises:
            ProtocolMismatch: there is no such place.
        """
        with self._mutex:
            segment = self._segments.get(number)
            if segment is None or offset < 0 or size <= 0 or offset + size > segment.capacity:
                raise ProtocolMismatch(f"the peer hands back bytes of segment {number}, which it has not borrowed")
            self._shelf.hold(number)
        return self._snapshot(segment, offset, size)

    def hold(self, number: int) -> None:
        """One more use of a segment in use; ended by `drop`."""
        with self._mutex:
            self._shelf.hold(number)

    def drop(self, number: int, *, spoil: bool = False) -> None:
        """A use has ended. ``spoil``: somebody may still look at it, so it must never be filled again."""
        with self._mutex:
            gone = self._settle()
            if self._shelf.drop(number, time.monotonic(), spoil=spoil):
                gone.append(number)
            self._remove(gone)
        self._tell(gone)

    def trim(self, *, all_free: bool = False) -> None:
        """Give idle segments back to the system."""
        with self._mutex:
            gone = self._settle()
            gone += self._shelf.trim(float("inf") if all_free else time.monotonic())
            self._remove(gone)
        self._tell(gone)

    def close(self) -> None:
        """Remove the directory. What is mapped somewhere stays readable there."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock_fd)

    def _take(self, size: int) -> _Segment | None:
        with self._mutex:
            gone = self._settle()
            number = self._shelf.take(size)
            if number is None:
                capacity = capacity_for(size)
                victims = self._shelf.make_room(capacity) if not self._closed else None
                gone += victims or []
                segment = self._make(capacity) if victims is not None else None
            else:
                segment = self._segments[number]
            self._remove(gone)
        self._tell(gone)
        return segment

    def _make(self, capacity: int) -> _Segment | None:
        room = os.statvfs(self.directory)
        if room.f_bavail * room.f_frsize < capacity + SPARE_BYTES:
            return None
        number = self._shelf.add(capacity)
        try:
            fd = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.ftruncate(fd, capacity)
            mapping = mmap.mmap(fd, capacity)
        except OSError:
            self._shelf.drop(number, 0.0, spoil=True)
            return None
        segment = self._segments[number] = _Segment(number, capacity, fd, mapping)
        return segment

    def _snapshot(self, segment: _Segment, offset: int, size: int) -> Snapshot:
        exporter = export(segment.mapping, offset, size)
        key, number = id(exporter), segment.number

        def ended(_: object) -> None:
            del self._views[key]
            self._uses_ended.append(number)

        self._views[key] = weakref.ref(exporter, ended)
        return Snapshot(number, size, exporter)

    def _settle(self) -> list[int]:
        """Enter in the books what finalizers have told."""
        gone = []
        while self._uses_ended:
            number = self._uses_ended.popleft()
            if self._shelf.drop(number, time.monotonic()):
                gone.append(number)
        return gone

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            segment = self._segments.pop(number, None)
            if segment is not None:
                os.close(segment.fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(number))

    def _tell(self, gone: list[int]) -> None:
        if gone:
            for tell in list(self.on_removed):
                tell(gone)

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, str(number))


_pool: SegmentPool | None = None
_refused = False
_making = threading.Lock()


def pool() -> SegmentPool | None:
    """This process's pool, made when first needed; None where there can be none."""
    global _pool, _refused
    if _pool is None and not _refused:
        with _making:
            if _pool is None and not _refused:
                try:
                    limit = limit_bytes()
                    _pool = SegmentPool(limit) if limit > 0 else None
                    sweep()
                except (OSError, ValueError):
                    _pool = None
                _refused = _pool is None
                if _pool is not None:
                    atexit.register(_pool.close)
    return _pool


def limit_bytes() -> int:
    """What this process may hold in segments; 0: it neither lends nor borrows any.

    Raises:
        ValueError: FRAY_SEGMENT_POOL_BYTES is no number.
    """
    return int(os.environ.get("FRAY_SEGMENT_POOL_BYTES") or LIMIT_BYTES)


def known_pool() -> SegmentPool | None:
    """The pool, if it has been made."""
    return _pool


def sweep(bases: tuple[str, ...] = BASES) -> int:
    """Remove what dead processes of this user left; returns how many directories that were."""
    return segment_directories.sweep(bases)


def _forget_after_fork() -> None:
    global _pool, _refused, _making
    if _pool is not None:
        atexit.unregister(_pool.close)
    _pool, _refused, _making = None, False, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
