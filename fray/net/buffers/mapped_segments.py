"""Segments of another process of this host, mapped into this one.

A process lends segments only to a peer that proves to be on its host, by reading a nonce file.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen

from fray.errors import ProtocolMismatch
from fray.net.buffers import segment_directories
from fray.net.buffers.segment_directories import NAME_BYTES, NONCE, prefix
from fray.net.buffers.shared_memory import export


@frozen
class SharedMemoryOffer:
    """Offer of a lender: the directory of its segments, and the content of the nonce file there."""

    directory: str
    nonce: str


@define(eq=False)
class _Mapped:
    mapping: mmap.mmap
    size: int


@define(eq=False)
class MappedSegments:
    """Segments of one lender, each mapped once. Created by `open`."""

    _fd: int
    _mapped: dict[int, _Mapped] = field(factory=dict)
    _loans: dict[int, weakref.ref[Any]] = field(factory=dict)
    ended: deque[int] = field(factory=deque)
    """Loans without any view left here; `on_ended` is called for each new one."""
    on_ended: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, offer: SharedMemoryOffer, bases: tuple[str, ...] | None = None) -> MappedSegments | None:
        """Open the segments after proving that the lender is on this host and of this user; else return None."""
        # The directory is the peer's word: only a name that Fray gives, below a known base, is opened at all.
        base, name = os.path.split(offer.directory)
        if (
            base not in (bases or segment_directories.bases())
            or not name.startswith(prefix())
            or len(name) != len(prefix()) + 2 * NAME_BYTES
        ):
            return None
        try:
            # Files are opened relative to this descriptor, so the directory that was checked is the one that is used.
            fd = os.open(offer.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # Reading the nonce proves the same host and user; a container with a /dev/shm of its own has another file
            # or none.
            if _is_private(os.fstat(fd), stat.S_ISDIR) and _read(fd, NONCE) == offer.nonce and offer.nonce:
                fd, opened = -1, fd
                return cls(opened)
        except (OSError, UnicodeDecodeError):
            pass
        finally:
            if fd >= 0:
                os.close(fd)
        return None

    def lease(self, loan: int, number: int, size: int) -> memoryview:
        """Return the first ``size`` bytes of a segment, writable. The loan is `ended` when their last view is gone.

        Raises:
            ProtocolMismatch: no such segment, or it is smaller.
        """
        mapped = self._mapped.get(number)
        # Mapped once and kept: each page of a fresh mapping costs a fault again.
        if mapped is None or mapped.size < size:
            mapped = self._mapped[number] = self._map(number, size)
        exporter = export(mapped.mapping, 0, size)

        def on_last_view_gone(_: object) -> None:
            # Runs wherever the last view is dropped, in any thread: atomic operations only, no lock.
            if self._loans.pop(loan, None) is not None:
                self.ended.append(loan)
                self.on_ended()

        self._loans[loan] = weakref.ref(exporter, on_last_view_gone)
        return memoryview(exporter).cast("B")

    def find(self, exporter: object) -> int | None:
        """Return the loan that this exporter belongs to."""
        # Over a copy: a finalizer in another thread may remove a loan meanwhile.
        return next((loan for loan, known in list(self._loans.items()) if known() is exporter), None)

    def give_up(self, loan: int) -> None:
        """Remove a loan that is returned together with its content, so its end is reported with that."""
        self._loans.pop(loan, None)

    def forget(self, numbers: list[int]) -> None:
        """Unmap segments that the lender has removed."""
        for number in numbers:
            # Existing views keep the mapping, and so the memory, until they are gone.
            self._mapped.pop(number, None)

    def close(self) -> None:
        """Close the directory. Remaining views stay readable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._mapped.clear()
        self._loans.clear()

    def _map(self, number: int, size: int) -> _Mapped:
        try:
            fd = os.open(str(number), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            raise ProtocolMismatch(f"the peer lends segment {number}, which cannot be opened: {error}") from None
        try:
            status = os.fstat(fd)
            # Checked on the open file: its name may lead to another one a moment later.
            if not _is_private(status, stat.S_ISREG) or status.st_size < size:
                raise ProtocolMismatch(f"the peer lends {size} bytes of segment {number}, which has {status.st_size}")
            return _Mapped(mmap.mmap(fd, status.st_size), status.st_size)
        finally:
            os.close(fd)


def _is_private(status: os.stat_result, kind: Callable[[int], bool]) -> bool:
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _read(directory_fd: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        return os.read(fd, 4 * NAME_BYTES).decode()
    finally:
        os.close(fd)
